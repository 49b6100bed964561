"""Runs trajectories on rollout nodes: the thin edge around `Assignment`, `Syncs`, `SnapshotStore` and `CallTally`.

Invariants: every `run()` returns exactly once (a trajectory, or why there is none); a trajectory has one owner at a
time and its generation tells owners apart; an acknowledged snapshot is held, and the next owner goes on from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Collection, Sequence

import grpc.aio
from fermata.v1 import rollout_pb2 as pb

from node_runtime.errors import EXIT_UNAVAILABLE, EXIT_USAGE, NodeError
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.segments import SegmentError
from trainer_node.assignment import Assignment, Entry, Fate
from trainer_node.node_stream import PROTOCOL_MINOR, NodeStream
from trainer_node.settings import DispatchSettings
from trainer_node.snapshots import CallTally, SnapshotStore, outcome_name
from trainer_node.syncs import Syncs
from trainer_node.trajectory import Trajectory, reason_name

# A trajectory's own deadline is kept by its node; the trainer steps in this much later.
DEADLINE_MARGIN_S = 10.0
WAIT_MESSAGE_EVERY_S = 5.0
WAIT_MESSAGE_FIRST_S = 1.0

log = get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Completed:
    trajectory: Trajectory


@dataclasses.dataclass(frozen=True, slots=True)
class Masked:
    """There is nothing to score: infrastructure failed. `tool` is empty where no tool had a part in it."""

    cause: str
    tool: str
    reason: str


Ended = Completed | Masked


@dataclasses.dataclass(slots=True)
class _Open:
    start: pb.RunRequest.Start
    future: asyncio.Future[Ended]
    deadline: float
    cancelled: bool = False


class Dispatcher:
    """`run()` one trajectory; `serve()` must run beside it for as long as anything is asked of it."""

    def __init__(
        self,
        addresses: Sequence[str],
        settings: DispatchSettings,
        runtime: RuntimeSettings,
        *,
        run_id: str,
        trainer_id: str = "trainer",
        epoch: int | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        watch: Callable[[str, pb.RunResponse.Event], None] | None = None,
    ) -> None:
        """`watch` is told every event of every node (address, event), before anything is done about it."""
        self.run_id = run_id
        self.calls = CallTally()
        self.moves = 0  # trajectories taken to another owner, from a snapshot or from their start
        self.resumes = 0  # of these, from a snapshot
        self.rejections = 0
        self._core = Assignment(addresses, max_moves=settings.max_moves)
        self._syncs = Syncs(self._core.nodes)
        self._store = SnapshotStore()
        self._open: dict[str, _Open] = {}
        self._settings = settings
        self._clock = clock
        self._watch = watch
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._broken_since: dict[str, float] = {}
        self._nobody_since = clock()
        hello = pb.RunRequest.Hello(
            protocol_minor=PROTOCOL_MINOR,
            run_id=run_id,
            trainer_id=trainer_id,
            # Of the process, not of the stream: a node keeps trajectories for the same trainer that comes back.
            epoch=epoch if epoch is not None else time.time_ns() // 1_000_000,
        )
        jitter = random.Random(seed)
        self._streams = {
            address: NodeStream(address, settings, runtime, hello, self, jitter) for address in dict.fromkeys(addresses)
        }

    # -- for the owner ----------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Keep the streams and the assignment going until cancelled.

        Raises NodeError (EXIT_UNAVAILABLE) where no node has been there for `node_timeout_s` while work waits.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for stream in self._streams.values():
                    group.create_task(stream.run(), name=f"rollout node {stream.address}")
                group.create_task(self._assign(), name="assignment")
        except* NodeError as group_of_one:
            error = group_of_one.exceptions[0]
        else:
            return
        raise error

    async def run(self, start: pb.RunRequest.Start, *, deadline_s: float) -> Ended:
        """Run one trajectory to its end, wherever there is room. Cancelling cancels it at its node too.

        `start.generation` and `start.deadline_ms` are filled in here.
        """
        trajectory_id = start.trajectory_id
        deadline = self._clock() + deadline_s
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        entry = Entry(trajectory_id, start.order, frozenset(start.tools), deadline + DEADLINE_MARGIN_S)
        self._core.add(entry)
        self._open[trajectory_id] = _Open(start, future, deadline)
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(trajectory_id, "the trainer no longer wants it")
            raise

    async def wait_for_nodes(self, timeout_s: float, on_wait: Callable[[str], None]) -> None:
        """Until one node is connected. NodeError (EXIT_UNAVAILABLE): not in `timeout_s`, or all refuse this trainer."""
        told = self._clock() - WAIT_MESSAGE_EVERY_S + WAIT_MESSAGE_FIRST_S
        try:
            async with asyncio.timeout(timeout_s):
                while not any(node.connected for node in self._core.nodes.values()):
                    if all(stream.refused for stream in self._streams.values()):
                        why = "; ".join(stream.why_not for stream in self._streams.values())
                        raise NodeError(f"no rollout node lets this trainer in: {why}", EXIT_UNAVAILABLE)
                    await self._next_change(WAIT_MESSAGE_FIRST_S)
                    if self._clock() - told >= WAIT_MESSAGE_EVERY_S:
                        told = self._clock()
                        on_wait(f"waiting for a rollout node: {self._why_none()}")
        except TimeoutError:
            raise NodeError(
                f"no rollout node answered within {timeout_s:g} s: {self._why_none()}; start one, or correct "
                "trainer.rollout_nodes",
                EXIT_UNAVAILABLE,
            ) from None

    async def wait_for_tools(self, named: dict[str, str], timeout_s: float, on_wait: Callable[[str], None]) -> None:
        """Until every tool that tasks name (tool → a task's id) is served. Raises NodeError (EXIT_USAGE)."""
        deadline = self._clock() + timeout_s
        while missing := sorted(set(named) - self.tools()):
            left = deadline - self._clock()
            if left <= 0:
                served = ", ".join(sorted(self.tools())) or "none"
                raise NodeError(
                    f"task {named[missing[0]]} names the tool {missing[0]!r}, which no rollout node offers "
                    f"(served: {served}): start a backend that has it, or correct the task",
                    EXIT_USAGE,
                )
            on_wait(f"waiting for the tools {', '.join(missing)}, which no rollout node offers yet")
            await asyncio.sleep(min(left, 1.0))
            # Tools are told in Welcome alone.
            for stream in self._streams.values():
                stream.reconnect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.1, deadline - self._clock())):
                    while not any(node.connected for node in self._core.nodes.values()):
                        await self._next_change(1.0)

    def tools(self) -> frozenset[str]:
        return frozenset().union(*(node.tools for node in self._core.nodes.values() if node.connected))

    def members(self) -> dict[str, grpc.aio.Channel]:
        """Name → channel of every node that is connected: whom a weight sync reaches.

        A name holds the process as well as the address: one that started anew is another member.
        """
        connected = [node for node in self._core.nodes.values() if node.connected]
        return {node.member: self._streams[node.address].channel for node in connected}

    @property
    def joined(self) -> asyncio.Event:
        """Set whenever a node is there that has no proven weights of this run."""
        return self._syncs.joined

    def synced(self, members: Collection[str], asked: Collection[str] | None = None) -> None:
        """As `Syncs.ended`."""
        self._syncs.ended(members, asked)
        self._wake.set()

    @property
    def in_flight(self) -> int:
        return len(self._open)

    async def settle(self) -> None:
        """Wait (bounded) until every cancelled trajectory has said how it ended, so that its calls are counted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.stop_grace_s):
                while self._open:
                    await self._next_change(1.0)
                # The acknowledgements of these ends are what lets nodes forget them.
                for stream in self._streams.values():
                    await stream.flushed()
        for trajectory_id in list(self._open):
            self._end(trajectory_id, Masked("stopped", "", "the trainer stopped before it ended"))

    # -- what nodes say ---------------------------------------------------------------------------------------------

    def on_event(self, address: str, event: pb.RunResponse.Event) -> None:
        if self._watch is not None:
            self._watch(address, event)
        kind = event.WhichOneof("event")
        if kind == "welcome":
            self._on_welcome(address, event.welcome)
        elif kind == "load":
            self._core.load(address, serving=event.load.serving, draining=event.load.draining)
            self._wake.set()
            self._notify()
        elif kind is not None and kind != "accepted":
            said = getattr(event, kind)
            if not self._core.is_current(address, said.trajectory_id, said.generation):
                # From an owner before this one, or said again: it ends there, or nobody would acknowledge it.
                if kind in ("finished", "failed", "handed_over"):
                    # What an older owner brings is not held: the present one may still have to fetch those results.
                    stored = said.trajectory_id not in self._core.entries
                    seq = said.snapshot.snapshot_seq if kind != "failed" else 0
                    self._acknowledge(address, said, seq, stored=stored)
                return
            getattr(self, f"_on_{kind}")(address, said)
            self._wake.set()

    def on_broken(self, address: str, reason: str) -> None:
        node = self._core.nodes[address]
        if node.connected:
            log.warning("the stream to a rollout node ended", address=address, reason=reason)
            self._broken_since[address] = self._clock()
        node.connected = node.serving = False
        self._wake.set()
        self._notify()

    def _on_welcome(self, address: str, welcome: pb.RunResponse.Welcome) -> None:
        node = self._core.nodes[address]
        self._broken_since.pop(address, None)
        if node.incarnation and node.incarnation != welcome.incarnation:
            # Another process at the same address: what the old one had open is gone.
            self._lose(address)
        fresh = self._core.connected(
            address,
            node_id=welcome.node_id or address,
            incarnation=welcome.incarnation,
            serving=welcome.load.serving,
            max_trajectories=welcome.max_trajectories,
            tools=welcome.tools,
            draining=welcome.load.draining,
        )
        self._syncs.connected(node, fresh=fresh)
        # What was written to the broken stream may not have arrived; a node that has it takes no notice.
        for trajectory_id in sorted(node.open, key=lambda known: self._core.entries[known].order):
            if self._open[trajectory_id].cancelled:
                self._cancel_at_node(trajectory_id, "the trainer no longer wants it")
            else:
                self._start(address, self._core.entries[trajectory_id])
        self._wake.set()
        self._notify()

    def _on_rejected(self, address: str, said: pb.RunResponse.Rejected) -> None:
        self.rejections += 1
        if self._open[said.trajectory_id].cancelled:
            self._end(said.trajectory_id, Masked("CANCELLED", "", "cancelled"))
            return
        never = said.retry_after_ms < 0
        retry_after = None if never else max(0.01, said.retry_after_ms / 1000)
        fate = self._core.rejected(said.trajectory_id, retry_after=retry_after, now=self._clock())
        if fate is not None:
            self._end(said.trajectory_id, Masked(fate.value, "", f"every node refused it, the last: {said.reason}"))

    def _on_parked(self, address: str, said: pb.RunResponse.Parked) -> None:
        if self._take(address, said) is not None:
            self._acknowledge(address, said, said.snapshot.snapshot_seq)

    def _on_handed_over(self, address: str, said: pb.RunResponse.HandedOver) -> None:
        if self._take(address, said) is not None:
            self._acknowledge(address, said, said.snapshot.snapshot_seq)
            # It leaves: until it says otherwise nothing goes there, least of all this one.
            self._core.nodes[address].draining = True
            self._move(said.trajectory_id)

    def _on_finished(self, address: str, said: pb.RunResponse.Finished) -> None:
        merged = self._take(address, said)
        if merged is None:
            return
        self.calls.ended(said.trajectory_id, said.calls)
        self._acknowledge(address, said, said.snapshot.snapshot_seq)
        if said.reason == pb.FINISH_REASON_DEADLINE:
            # How far a trajectory gets in a time depends on how busy the machines are: no reward may hang on that.
            self._end(said.trajectory_id, Masked("DEADLINE", "", "the trajectory's time ran out while it was sampled"))
            return
        if said.reason not in pb.FinishReason.values() or said.reason == pb.FINISH_REASON_UNSPECIFIED:
            # A newer node's: whom such an end blames is not known, so it is not scored.
            sentence = f"it ended for the reason {reason_name(said.reason)}, which this trainer does not know"
            self._end(said.trajectory_id, Masked("PROTOCOL", "", sentence))
            return
        try:
            trajectory = Trajectory.of(said, merged)
        except SegmentError as error:
            self._end(said.trajectory_id, Masked("PROTOCOL", "", f"its columns contradict themselves: {error}"))
            return
        self._end(said.trajectory_id, Completed(trajectory))

    def _on_failed(self, address: str, said: pb.RunResponse.Failed) -> None:
        self.calls.ended(said.trajectory_id, said.calls)
        self._acknowledge(address, said, 0)
        cause = outcome_name(said.outcome) if said.outcome else "INTERNAL"
        self._end(said.trajectory_id, Masked(cause, said.tool, said.reason))

    # -- how it is done ---------------------------------------------------------------------------------------------

    async def _assign(self) -> None:
        while True:
            self._wake.clear()
            now = self._clock()
            for address, since in list(self._broken_since.items()):
                if now - since >= self._settings.reconnect_grace_s:
                    del self._broken_since[address]
                    self._lose(address)
            for trajectory_id in self._core.expired(now):
                self._cancel_at_node(trajectory_id, "its deadline has passed")
                self._end(trajectory_id, Masked(Fate.DEADLINE.value, "", "its deadline passed and no node said so"))
            for address, entry in self._core.plan(now):
                self._start(address, entry)
            if not self._open or any(node.connected for node in self._core.nodes.values()):
                self._nobody_since = now
            elif now - self._nobody_since > self._settings.node_timeout_s:
                raise NodeError(
                    f"no rollout node has been there for {self._settings.node_timeout_s:g} s: {self._why_none()}",
                    EXIT_UNAVAILABLE,
                )
            due = [since + self._settings.reconnect_grace_s for since in self._broken_since.values()]
            due.extend((self._core.next_due(now) or now + 60.0, now + 5.0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, min(due) - now)):
                    await self._wake.wait()

    def _start(self, address: str, entry: Entry) -> None:
        opened = self._open[entry.trajectory_id]
        start = pb.RunRequest.Start()
        start.CopyFrom(opened.start)
        start.generation = entry.generation
        now = self._clock()
        start.deadline_ms = max(1, round((opened.deadline - now) * 1000))
        held = self._store.get(entry.trajectory_id)
        if held is None:
            event = pb.RunRequest.Event(start=start)
        else:
            resume = pb.RunRequest.Resume(
                start=start, snapshot=held.snapshot, held_ms=max(0, round((now - held.since) * 1000))
            )
            event = pb.RunRequest.Event(resume=resume)
        self._streams[address].send(event)

    def _take(
        self, address: str, said: pb.RunResponse.Parked | pb.RunResponse.Finished | pb.RunResponse.HandedOver
    ) -> pb.Snapshot | None:
        try:
            merged = self._store.take(said.trajectory_id, said.snapshot, self._clock())
        except SegmentError as error:
            log.error("a snapshot does not fit", trajectory=said.trajectory_id, address=address, error=str(error))
            self._cancel_at_node(said.trajectory_id, "its snapshot does not fit what is held")
            self._end(said.trajectory_id, Masked("PROTOCOL", "", str(error)))
            return None
        self.calls.seen(said.trajectory_id, merged)
        return merged

    def _acknowledge(
        self,
        address: str,
        said: pb.RunResponse.Parked | pb.RunResponse.Finished | pb.RunResponse.HandedOver | pb.RunResponse.Failed,
        snapshot_seq: int,
        *,
        stored: bool = True,
    ) -> None:
        ack = pb.RunRequest.AckSnapshot(
            trajectory_id=said.trajectory_id, generation=said.generation, snapshot_seq=snapshot_seq, stored=stored
        )
        self._streams[address].send(pb.RunRequest.Event(ack_snapshot=ack))

    def _lose(self, address: str) -> None:
        """The process there is gone, or out of reach for too long."""
        again, ended = self._core.lost(address, self._clock())
        for trajectory_id in again:
            if self._open[trajectory_id].cancelled:
                self._end(trajectory_id, Masked("CANCELLED", "", "cancelled"))
            else:
                self.moves += 1
                self.resumes += self._store.get(trajectory_id) is not None
        if again or ended:
            log.warning(
                "a node is lost, what it had goes on elsewhere", address=address, moved=len(again), ended=len(ended)
            )
        for trajectory_id, fate in ended.items():
            self._end(trajectory_id, Masked(fate.value, "", f"its node was lost {self._settings.max_moves + 1} times"))

    def _move(self, trajectory_id: str) -> None:
        if self._open[trajectory_id].cancelled:
            self._end(trajectory_id, Masked("CANCELLED", "", "cancelled"))
        elif self._core.moved(trajectory_id, self._clock()):
            self.moves += 1
            self.resumes += 1
        else:
            self._end(trajectory_id, Masked(Fate.NODE_LOST.value, "", "it was handed over too often"))

    def _cancel(self, trajectory_id: str, reason: str) -> None:
        """Nobody waits for it any more. Where a node has it, it stays known until that node says how it ended."""
        opened, entry = self._open.get(trajectory_id), self._core.entries.get(trajectory_id)
        if opened is None or entry is None:
            return
        opened.cancelled = True
        if entry.node is None:
            self._end(trajectory_id, Masked("CANCELLED", "", reason))
            return
        entry.deadline = min(entry.deadline, self._clock() + DEADLINE_MARGIN_S)
        self._cancel_at_node(trajectory_id, reason)

    def _cancel_at_node(self, trajectory_id: str, reason: str) -> None:
        entry = self._core.entries.get(trajectory_id)
        if entry is not None and entry.node is not None:
            cancel = pb.RunRequest.Cancel(trajectory_id=trajectory_id, reason=reason)
            self._streams[entry.node].send(pb.RunRequest.Event(cancel=cancel))

    def _end(self, trajectory_id: str, ended: Ended) -> None:
        self._core.remove(trajectory_id)
        held = self._store.get(trajectory_id)
        self.calls.close(trajectory_id, held.snapshot if held is not None else None)
        self._store.drop(trajectory_id)
        opened = self._open.pop(trajectory_id, None)
        if opened is not None and not opened.future.done():
            opened.future.set_result(ended)
        self._wake.set()
        if not self._open:
            self._notify()

    def _why_none(self) -> str:
        why = {address: stream.why_not for address, stream in self._streams.items()}
        why.update((address, "connected") for address, node in self._core.nodes.items() if node.connected)
        return ", ".join(f"{address} ({reason})" for address, reason in why.items())

    def _notify(self) -> None:
        # Whoever waits holds the old event; the next to wait gets a new one.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self, timeout_s: float) -> bool:
        """Until something changes about nodes or open trajectories; False after `timeout_s`."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True
