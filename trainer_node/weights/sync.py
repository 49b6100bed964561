"""WeightSync: pushes the policy's weights to the rollout nodes and has every node prove what it serves.

Invariants: a push ends within its bounds whatever a node does, with one report per node; a node that does not answer
costs the others no proof (they go on, or are pushed to again in a group without it); a group that a failure has touched
is never used again.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc.aio
import torch
from fermata.v1 import tool_pb2
from fermata.v1 import weights_pb2 as pb

from node_runtime import weight_wire
from node_runtime.logs import get_logger
from node_runtime.weight_wire import TensorMeta
from trainer_node.weights import senders
from trainer_node.weights.control import Lost, NodeControl, Refused
from trainer_node.weights.group import GroupError, TransferGroup, in_thread
from trainer_node.weights.report import NodeReport, SyncReport, differing_shards

log = get_logger(__name__)

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]
ProbeLogprobs = Callable[[list[list[int]]], list[list[float]]]
# Groups made for one push: the first, one without whoever was lost, one more for a node lost meanwhile.
MAX_GROUPS = 3


@dataclass(frozen=True)
class SyncOptions:
    """Bounds and choices of all pushes. Times in seconds."""

    backend: Literal["gloo", "nccl"] = "gloo"
    host: str = "127.0.0.1"  # this machine, as the rollout nodes reach it
    find_timeout_s: float = 5.0
    join_timeout_s: float = 30.0
    start_timeout_s: float = 10.0  # a frozen node keeps the others paused for so long
    step_timeout_s: float = 60.0  # each of Update and Finish
    bucket_bytes: int = weight_wire.DEFAULT_BUCKET_BYTES
    keep_kv: bool = False
    tolerance: float | None = None  # largest log-probability difference; None: the node's own, by its dtype
    model_id: str = ""


class WeightSync:
    """One per trainer. `push` calls do not overlap."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel], options: SyncOptions) -> None:
        self._options = options
        self._members = {node: NodeControl(node, channel) for node, channel in channels.items()}
        self._group: TransferGroup | None = None
        self._generation = 0
        # Sending happens in threads, which begin on device 0.
        self._device = torch.accelerator.current_device_index() if options.backend == "nccl" else -1

    @classmethod
    async def open(
        cls,
        channels: Mapping[str, grpc.aio.Channel],
        backend: Literal["gloo", "nccl"] = "gloo",
        **options: Any,
    ) -> WeightSync:
        """Over these nodes; the transfer group is made by the first push. `options`: fields of SyncOptions."""
        return cls(channels, SyncOptions(backend=backend, **options))

    def set_members(self, channels: Mapping[str, grpc.aio.Channel]) -> None:
        """Who takes part from the next push on. A change makes the group anew."""
        known = self._members
        self._members = {
            node: known[node] if node in known and known[node].channel is channel else NodeControl(node, channel)
            for node, channel in channels.items()
        }

    async def push(
        self,
        version: pb.WeightVersion,
        named_tensors: NamedTensors,
        probes: Sequence[Sequence[int]],
        probe_logprobs: ProbeLogprobs,
        *,
        tolerance: float | None = None,
    ) -> SyncReport:
        """Sends all tensors as `version` and returns what every node proved.

        `named_tensors` is called more than once and must give the same tensors each time; they and the model behind
        `probe_logprobs` (token i+1 given the first i+1, natural log, temperature 1) must not change meanwhile. Both are
        called in a thread.
        """
        began = time.monotonic()
        report = SyncReport(version, {node: NodeReport(node) for node in self._members})
        rows = [list(probe) for probe in probes]
        metas = senders.metas_of(named_tensors())
        expected, alive = await asyncio.gather(
            in_thread(lambda: probe_logprobs(rows), "weights-probes"), self._find_members(report)
        )
        packed = [
            pb.Probe(token_ids=array("i", ids).tobytes(), logprobs=array("f", values).tobytes())
            for ids, values in zip(rows, expected, strict=True)
        ]
        limit = self._options.tolerance if tolerance is None else tolerance
        round_ = _Round(version, metas, named_tensors, packed, limit or 0.0, report)
        for _ in range(MAX_GROUPS):
            if not alive:
                break
            alive = await self._push_to(alive, round_)
        for member in alive:
            report.nodes[member.node].error = (
                report.nodes[member.node].error or f"{member.node}: {MAX_GROUPS} transfer groups failed in one push"
            )
        await self._compare_shards(report)
        report.seconds["total"] = time.monotonic() - began
        return report

    async def close(self) -> None:
        """Leaves the group and has the nodes leave it, as far as they answer."""
        group, self._group = self._group, None
        if group is None:
            return
        group.close()
        members = [member for node, member in self._members.items() if node in group.nodes]
        request = pb.MembershipRequest(group_generation=group.generation, leave=True)
        answers = await asyncio.gather(
            *(member.call("Membership", request, self._options.find_timeout_s) for member in members),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, Lost | Refused):
                log.warning(f"leaving the transfer group: {answer}")
            elif isinstance(answer, BaseException):
                raise answer

    async def _find_members(self, report: SyncReport) -> list[NodeControl]:
        """The members that answer; the others are reported."""
        members = list(self._members.values())
        backend = senders.GlooSender.backend if self._options.backend == "gloo" else senders.NcclSender.backend
        answers = await asyncio.gather(
            *(member.find(backend, self._options.find_timeout_s) for member in members), return_exceptions=True
        )
        return _sort_out(members, answers, report)

    async def _push_to(self, members: list[NodeControl], round_: _Round) -> list[NodeControl]:
        """One try over these members. Returns those to try again, in a new group."""
        report, step_s = round_.report, self._options.step_timeout_s
        began = time.monotonic()
        try:
            group = await self._ensure_group(members, round_.version)
        except GroupError as error:
            for node, why in error.lost.items():
                report.nodes[node].error = why
                report.nodes[node].reached = False
            return [member for member in members if member.node not in error.lost] if error.lost else members
        finally:
            _add(report.seconds, "group", began)
        began = time.monotonic()
        start = pb.StartRequest(
            context=self._context(round_.version, group, self._options.start_timeout_s),
            kind=pb.UPDATE_KIND_FULL,
            kv_policy=pb.KV_POLICY_KEEP if self._options.keep_kv else pb.KV_POLICY_RECOMPUTE,
        )
        started = await self._all(members, "Start", start, report, self._options.start_timeout_s)
        _add(report.seconds, "start", began)
        if len(started) < len(members):
            # A broadcast needs everybody in the group: the others are let go and take part in the next one.
            self._drop_group()
            await self._abort(started, round_.version, group, "another node could not start")
            return started
        began = time.monotonic()
        update = pb.UpdateRequest(
            context=self._context(round_.version, group, step_s),
            tensors=[pb.TensorMeta(name=m.name, dtype=m.dtype, shape=m.shape) for m in round_.metas],
        )
        async with asyncio.TaskGroup() as tasks:
            updates = tasks.create_task(self._all(members, "Update", update, report, step_s))
            broadcast = tasks.create_task(self._broadcast(round_, group, step_s))
        updated, digests = updates.result(), broadcast.result()
        _add(report.seconds, "transfer", began)
        if isinstance(digests, ValueError):
            raise digests
        again = [member for member in members if member not in updated and report.nodes[member.node].reached]
        if digests is None:
            await self._abort(updated, round_.version, group, "the broadcast broke off")
            return [*again, *updated]
        if len(updated) < len(members):
            self._drop_group()
        await self._finish(updated, round_, group, digests)
        return again

    async def _broadcast(
        self, round_: _Round, group: TransferGroup, timeout_s: float
    ) -> list[bytes] | ValueError | None:
        """The digests; None where it broke off, the error where the caller's tensors do not fit together."""
        try:
            async with asyncio.timeout(timeout_s):
                return await in_thread(
                    lambda: group.sender.send(round_.metas, round_.named_tensors(), timeout_s), "weights-send"
                )
        except (TimeoutError, RuntimeError, OSError, ValueError) as error:
            # Cut the connections, so that nodes which wait for us give up now.
            self._drop_group()
            log.warning(f"the broadcast of version {round_.version.number} broke off: {_first_line(error)}")
            return error if isinstance(error, ValueError) else None

    async def _finish(
        self, members: list[NodeControl], round_: _Round, group: TransferGroup, digests: list[bytes]
    ) -> None:
        report, began = round_.report, time.monotonic()
        request = pb.FinishRequest(
            context=self._context(round_.version, group, self._options.step_timeout_s),
            algorithm=pb.DIGEST_ALGORITHM_SHA256,
            digests=[pb.TensorDigest(name=m.name, digest=d) for m, d in zip(round_.metas, digests, strict=True)],
            probes=round_.probes,
            probe_tolerance=round_.tolerance,
        )
        await self._all(members, "Finish", request, report, self._options.step_timeout_s, tensors=len(digests))
        if any(not report.nodes[member.node].reached for member in members):
            self._drop_group()
        _add(report.seconds, "finish", began)

    async def _all(
        self,
        members: list[NodeControl],
        method: str,
        request: Any,
        report: SyncReport,
        timeout_s: float,
        *,
        tensors: int = 0,
    ) -> list[NodeControl]:
        """One step on all members. Returns those that did it; the others' errors are in the report."""
        answers = await asyncio.gather(
            *(member.call(method, request, timeout_s) for member in members), return_exceptions=True
        )
        for member, answer in zip(members, answers, strict=True):
            response = answer.response if isinstance(answer, Refused) else answer
            if not isinstance(response, BaseException):
                _note(report.nodes[member.node], response, tensors)
        return _sort_out(members, answers, report)

    async def _abort(
        self, members: list[NodeControl], version: pb.WeightVersion, group: TransferGroup, reason: str
    ) -> None:
        request = pb.AbortRequest(context=self._context(version, group, self._options.step_timeout_s), reason=reason)
        answers = await asyncio.gather(
            *(member.call("Abort", request, self._options.step_timeout_s) for member in members),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, Lost | Refused):
                log.warning(f"giving version {version.number} up: {answer}")
            elif isinstance(answer, BaseException):
                raise answer

    async def _compare_shards(self, report: SyncReport) -> None:
        """Part (b) between nodes: who differs from nodes of the same layout is told to serve nothing."""
        proofs = {n.node: n.proof for n in report.nodes.values() if n.holds and n.proof is not None}
        for node, why in differing_shards(proofs).items():
            report.nodes[node].holds = False
            report.nodes[node].error = why
            if self._group is not None and node in self._members:
                await self._abort([self._members[node]], report.version, self._group, why)

    async def _ensure_group(self, members: list[NodeControl], version: pb.WeightVersion) -> TransferGroup:
        group = self._group
        if (
            group is not None
            and group.nodes == {member.node for member in members}
            and group.lineage == version.lineage
            # A node that was started anew is in no group.
            and all(member.generation == group.generation for member in members)
        ):
            return group
        self._drop_group()
        # Newer than any that a member has seen, also from a predecessor of this object.
        self._generation = max(self._generation, *(member.generation for member in members)) + 1
        self._group = await TransferGroup.form(
            self._make_sender, members, version, self._generation, timeout_s=self._options.join_timeout_s
        )
        return self._group

    def _make_sender(self) -> senders.Sender:
        options = self._options
        if options.backend == "gloo":
            return senders.GlooSender(options.host, bucket_bytes=options.bucket_bytes)
        return senders.NcclSender(options.host, self._device, bucket_bytes=options.bucket_bytes)

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _context(self, version: pb.WeightVersion, group: TransferGroup, timeout_s: float) -> pb.SyncContext:
        return pb.SyncContext(
            version=version,
            target=pb.SyncTarget(model_id=self._options.model_id),
            group_generation=group.generation,
            deadline_ms=int(timeout_s * 1000),
        )


@dataclass(frozen=True)
class _Round:
    """What one push sends."""

    version: pb.WeightVersion
    metas: list[TensorMeta]
    named_tensors: NamedTensors
    probes: list[pb.Probe]
    tolerance: float
    report: SyncReport


def _sort_out(members: list[NodeControl], answers: Sequence[Any], report: SyncReport) -> list[NodeControl]:
    """Who did the step. Errors of the others go into the report."""
    done = []
    for member, answer in zip(members, answers, strict=True):
        node = report.nodes[member.node]
        if isinstance(answer, Lost):
            node.reached, node.error = False, str(answer)
        elif isinstance(answer, Refused):
            node.error = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            done.append(member)
    return done


def _note(node: NodeReport, response: Any, tensors: int) -> None:
    """What a response says of proof and times."""
    for field, phase in (
        ("pause_us", "pause"),
        ("receive_us", "receive"),
        ("load_us", "load"),
        ("prove_us", "prove"),
        ("paused_us", "paused"),
    ):
        if field in response.DESCRIPTOR.fields_by_name:
            node.seconds[phase] = getattr(response, field) / 1e6
    # A proof that could not be made (the engine died, the time ran out) is none, and says nothing of the weights.
    made = isinstance(response, pb.FinishResponse) and response.HasField("proof")
    if made and response.status.outcome != tool_pb2.OUTCOME_INDETERMINATE:
        node.proof = response.proof
        node.tensors = tensors
        node.holds = response.proof.holds and response.serving
        if node.holds:
            node.error = ""


def _add(seconds: dict[str, float], phase: str, began: float) -> None:
    seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
