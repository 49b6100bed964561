"""Trajectories for those who train nothing: a notebook, a script, an experiment.

Owns a dispatcher and the stream beside it. Invariants: nodes serve the weights they have, nobody syncs them; every
rollout ends with one trajectory or with one sentence why there is none; after `close` no rollout goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from fermata.v1 import rollout_pb2 as pb

from node_runtime.errors import EXIT_FAILED, EXIT_UNAVAILABLE, NodeError
from node_runtime.runtime_settings import RuntimeSettings
from trainer_node.dispatcher import Dispatcher, Masked
from trainer_node.sampling import to_message
from trainer_node.settings import DispatchSettings
from trainer_node.trajectory import Trajectory


class RolloutFailed(NodeError):
    """There is no trajectory and nothing to score; the sentence says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """What a node said of a trajectory, and when it arrived, in seconds since the rollout was started."""

    seconds: float
    kind: str  # accepted, parked, finished, failed, rejected, handed_over
    said: Any  # the message of rollout.proto


class Rollout:
    """One trajectory under way: `await` it for the `Trajectory`; cancelling that cancels it at its node too."""

    def __init__(self, trajectory_id: str) -> None:
        self.trajectory_id = trajectory_id
        self.started = time.time()  # Unix seconds, as in spans
        self.heard: list[Heard] = []
        self._began = time.monotonic()
        self._news = asyncio.Event()
        self._task: asyncio.Task[Trajectory] | None = None

    def __await__(self) -> Generator[Any, None, Trajectory]:
        assert self._task is not None
        return self._task.__await__()

    @property
    def done(self) -> bool:
        return self._task is not None and self._task.done()

    async def until(self, kind: str) -> Heard:
        """The first event of this kind. Raises RolloutFailed where the rollout ends without one."""
        while True:
            for heard in self.heard:
                if heard.kind == kind:
                    return heard
            if self.done:
                ends = ", ".join(heard.kind for heard in self.heard) or "nothing"
                raise RolloutFailed(f"rollout {self.trajectory_id} was never {kind}; heard of it: {ends}", EXIT_FAILED)
            self._news.clear()
            await self._news.wait()

    def _follow(self, task: asyncio.Task[Trajectory]) -> None:
        self._task = task
        task.add_done_callback(lambda _: self._news.set())

    def _hear(self, kind: str, said: Any) -> None:
        self.heard.append(Heard(time.monotonic() - self._began, kind, said))
        self._news.set()


class RolloutClient:
    """`connect` (or `async with`), then `start` rollouts; all of them share one stream to each node."""

    def __init__(
        self, addresses: Sequence[str], *, runtime: RuntimeSettings | None = None, run_id: str | None = None
    ) -> None:
        """`addresses`: host:port of each rollout node. `run_id`: none makes one; it begins every call's key."""
        self.run_id = run_id or f"run-{uuid.uuid4().hex[:12]}"
        self.loads: dict[str, pb.RunResponse.Load] = {}  # by address, as each node last told it
        self._dispatcher = Dispatcher(
            addresses,
            DispatchSettings(),
            runtime or RuntimeSettings(),
            run_id=self.run_id,
            trainer_id="client",
            watch=self._on_event,
        )
        self._orders = itertools.count(1)
        self._open: dict[str, Rollout] = {}
        self._serving: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self, timeout_s: float = 60.0) -> Self:
        """Raises NodeError where no node answers, or where those that do serve no weights."""
        self._serving = [
            asyncio.create_task(self._dispatcher.serve(), name="rollout client"),
            asyncio.create_task(self._take_as_they_are(), name="nodes of the rollout client"),
        ]
        try:
            await self._dispatcher.wait_for_nodes(timeout_s, lambda _: None)
            if not any(load.serving for load in self.loads.values()):
                address, load = next(iter(self.loads.items()))
                why = load.detail or "it does not say why"
                raise NodeError(f"the rollout node at {address} does not serve: {why}", EXIT_UNAVAILABLE)
        except BaseException:
            await self.close()
            raise
        return self

    async def _take_as_they_are(self) -> None:
        """A trainer gives work to those nodes alone that it has synced; here there is no trainer."""
        while True:
            await self._dispatcher.joined.wait()
            self._dispatcher.synced(self._dispatcher.members())

    async def close(self) -> None:
        """Cancels what is open, here and at the nodes; may be called again."""
        rollouts = [rollout._task for rollout in self._open.values() if rollout._task is not None]
        for task in rollouts:
            task.cancel()
        await asyncio.gather(*rollouts, return_exceptions=True)
        serving, self._serving = self._serving, []
        if serving:
            await self._dispatcher.settle()
        for service in serving:
            service.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def start(
        self,
        messages: str | Sequence[tuple[str, str]],
        *,
        tools: Sequence[str] = (),
        name: str = "t",
        temperature: float = 1.0,
        context: Mapping[str, str] | None = None,
        limits: pb.Limits | None = None,
        deadline_s: float = 3600.0,
    ) -> Rollout:
        """Start a trajectory and return at once.

        `messages`: the user's question, or (role, content) each. `name` begins its id; a number follows.
        `context`: what tools are told beside the arguments, never seen by the model. `limits`: fields left out are the
        node's own.
        """
        order = next(self._orders)
        rollout = Rollout(f"{name}-{order:04d}")
        start = pb.RunRequest.Start(
            run_id=self.run_id,
            trajectory_id=rollout.trajectory_id,
            order=order,
            sampling=pb.Sampling(temperature=temperature, logprobs=True),
            mode=pb.MODE_SUSPEND,
            tools=tools,
            limits=limits,
            context=context or {},
            messages=[
                to_message(role, content)
                for role, content in ([("user", messages)] if isinstance(messages, str) else messages)
            ],
        )
        self._open[rollout.trajectory_id] = rollout
        rollout._follow(asyncio.create_task(self._run(start, deadline_s), name=f"rollout {rollout.trajectory_id}"))
        return rollout

    async def _run(self, start: pb.RunRequest.Start, deadline_s: float) -> Trajectory:
        work = asyncio.ensure_future(self._dispatcher.run(start, deadline_s=deadline_s))
        try:
            await asyncio.wait((work, *self._serving), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                for task in self._serving:
                    if task.done():
                        task.result()  # why it ended
            ended = work.result()
        finally:
            work.cancel()
            self._open.pop(start.trajectory_id, None)
        if isinstance(ended, Masked):
            raise RolloutFailed(f"rollout {start.trajectory_id} failed ({ended.cause}): {ended.reason}", EXIT_FAILED)
        return ended.trajectory

    def _on_event(self, address: str, event: pb.RunResponse.Event) -> None:
        kind = event.WhichOneof("event")
        if kind is None:
            return
        said = getattr(event, kind)
        if kind in ("welcome", "load"):
            self.loads[address] = said.load if kind == "welcome" else said
        elif (rollout := self._open.get(said.trajectory_id)) is not None:
            rollout._hear(kind, said)
