"""Which weights the nodes serve: versions, probes and the decision whether a run may go on.

Owns the lineage and its numbers. Invariants: a number names one set of weights for ever; no trajectory is given to a
node that has not proven the weights of this lineage; a proof that fails ends the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import grpc.aio

from node_runtime.errors import EXIT_FAILED, NodeError
from node_runtime.logs import get_logger
from node_runtime.segments import Version
from trainer_node import metrics
from trainer_node.dispatcher import Dispatcher
from trainer_node.settings import SyncSettings
from trainer_node.trajectory import Trajectory

MAX_TRIES = 6
# Doubling: a node whose engine has died needs some seconds to leave, and another to take its place.
TRY_PAUSE_S, MAX_TRY_PAUSE_S = 0.5, 4.0

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeProof:
    """What one node said of one sync. `reached=False`: it never got to a proof, which proves nothing against it."""

    holds: bool
    reached: bool = True
    detail: str = ""
    tensors: int = 0  # digests compared
    received_equal: bool = False
    probe_tokens: int = 0
    probe_mean_diff: float = 0.0
    probe_max_diff: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PushResult:
    proofs: Mapping[str, NodeProof]  # by member, as pushed to
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by phase


class Pusher(Protocol):
    """Sends the model's present weights to these nodes and has them proven."""

    async def push(
        self, members: Mapping[str, grpc.aio.Channel], version: Version, probes: Sequence[Sequence[int]]
    ) -> PushResult: ...
    async def close(self) -> None: ...


@dataclasses.dataclass(slots=True)
class SyncTally:
    """Sums over the syncs of a run."""

    syncs: int = 0
    tensors: int = 0
    unequal: int = 0
    probe_tokens: int = 0
    probe_total: float = 0.0
    probe_max: float = 0.0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, result: PushResult) -> None:
        self.syncs += 1
        for proof in result.proofs.values():
            if proof.reached:
                self.tensors += proof.tensors
                self.unequal += not proof.received_equal
                self.probe_tokens += proof.probe_tokens
                self.probe_total += proof.probe_mean_diff * proof.probe_tokens
                self.probe_max = max(self.probe_max, proof.probe_max_diff)
        for phase, seconds in result.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @property
    def probe_mean(self) -> float | None:
        return self.probe_total / self.probe_tokens if self.probe_tokens else None


class Publisher:
    """Numbers and pushes the weights of one run."""

    def __init__(
        self,
        pusher: Pusher,
        dispatcher: Dispatcher,
        settings: SyncSettings,
        *,
        vocab_size: int,
        seed: int,
        node_timeout_s: float,
        on_wait: Callable[[str], None],
        lineage: str | None = None,
    ) -> None:
        self.version = Version(lineage or uuid.uuid4().hex, 0)
        self.tally = SyncTally()
        self._pusher = pusher
        self._dispatcher = dispatcher
        self._settings = settings
        self._node_timeout_s = node_timeout_s
        self._on_wait = on_wait
        self._random = random.Random(f"{seed}/probes")
        self._vocab_size = vocab_size
        self._probes = [self._random_probe() for _ in range(settings.probes)]

    def probe_with(self, trajectories: Sequence[Trajectory]) -> None:
        """From now on probe with what the model really reads and writes: beginnings of these trajectories."""
        fitting = [t for t in trajectories if len(t) >= 2]
        chosen = self._random.sample(fitting, min(len(fitting), self._settings.probes))
        if chosen:
            self._probes = [list(t.ids[: self._settings.probe_tokens]) for t in chosen]

    async def publish(self, *, changed: bool = True) -> PushResult:
        """Push the present weights as the next version. Raises NodeError where a proof fails or nobody is reached.

        `changed` False: they are those of the present version, for nodes that have not got them. The number stays: what
        was sampled must not grow older because a node came.
        """
        last = "no node was there"
        for tried in range(MAX_TRIES):
            members = self._dispatcher.members()
            if not members:
                await self._dispatcher.wait_for_nodes(self._node_timeout_s, self._on_wait)
                continue
            # Each try to change them has its own number: half of an earlier one may have arrived somewhere.
            version = Version(self.version.lineage, self.version.number + changed)
            self.version = version
            result = await self._pusher.push(members, version, self._probes)
            failed = {member: proof for member, proof in result.proofs.items() if proof.reached and not proof.holds}
            self.tally.add(result)
            if failed:
                member, proof = next(iter(failed.items()))
                self._dispatcher.synced(())
                raise NodeError(
                    f"weight sync {version.number} failed its proof at {member}: "
                    f"{proof.detail or 'no reason'}; it does not serve what the trainer has, so the run stops",
                    EXIT_FAILED,
                )
            proven = [member for member, proof in result.proofs.items() if proof.holds]
            self._dispatcher.synced(proven, asked=members)
            last = "; ".join(f"{member}: {proof.detail}" for member, proof in result.proofs.items() if not proof.holds)
            if proven:
                if last:
                    log.warning("nodes without proof get nothing until the next sync", version=version.number, why=last)
                metrics.WEIGHT_VERSION.set(version.number)
                return result
            log.warning("no node was reached by a weight sync, it is tried again", version=version.number, reason=last)
            if tried + 1 < MAX_TRIES:
                await asyncio.sleep(min(MAX_TRY_PAUSE_S, TRY_PAUSE_S * 2**tried))
        raise NodeError(f"no rollout node could be given the weights in {MAX_TRIES} tries: {last}", EXIT_FAILED)

    async def close(self) -> None:
        """Leave the transfer group."""
        await self._pusher.close()

    def _random_probe(self) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(self._settings.probe_tokens)]
