"""A rollout node that owns one trajectory, and the snapshot its trainer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fermata.v1 import gateway_pb2 as gw
from fermata.v1 import rollout_pb2 as ro
from fermata.v1 import tool_pb2 as tool

from tests.property.contract.gateway import Gateway, Stream
from tests.property.contract.messages import CALL_TIMEOUT_MS, digest

if TYPE_CHECKING:
    from tests.property.contract.world import World


@dataclass
class Call:
    start: gw.ClientFrame.CallStart
    first_sent: int | None
    deadline: int
    result: tool.Final | None = None
    results_seen: int = 0


class Node:
    """A rollout process that owns one trajectory in one generation."""

    def __init__(self, world: World, session_id: str, generation: int) -> None:
        self.world, self.session_id, self.generation = world, session_id, generation
        self.epoch = 0
        self.stream: Stream | None = None
        self.welcomed = False
        self.calls: dict[str, Call] = {}
        self.keep: list[str] = []

    def connect(self, gateway: Gateway) -> None:
        if self.stream is not None:
            self.stream.alive = False
        self.epoch += 1
        self.stream = self.world.open(Stream(self, gateway, self.epoch))
        self.welcomed = False
        hello = gw.ClientFrame.Hello(session_id=self.session_id, epoch=self.epoch)
        self.stream.up.append(gw.ClientFrame.Event(hello=hello))

    def new_call(self, key: str, tool_name: str) -> None:
        start = gw.ClientFrame.CallStart(
            key=key,
            trajectory_id="t",
            generation=self.generation,
            tool=tool_name,
            args_json=b"{}",
            args_sha256=digest(b"{}"),
            mode=gw.ClientFrame.CallStart.MODE_START_OR_JOIN,
        )
        self.calls[key] = Call(start, None, self.world.now + CALL_TIMEOUT_MS)
        if self.welcomed:
            self.send(self.calls[key])

    def send(self, call: Call) -> None:
        if call.result is not None or self.stream is None or not self.stream.alive:
            return
        if call.first_sent is None:
            call.first_sent = self.world.now
        else:
            call.start.resend = True
        call.start.age_ms = self.world.now - call.first_sent
        call.start.total_timeout_ms = max(0, call.deadline - self.world.now)
        event = gw.ClientFrame.Event()
        event.call_start.CopyFrom(call.start)
        self.stream.up.append(event)

    def receive(self, event: gw.ServerFrame.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "welcome":
            self.welcomed = True
            assert self.stream is not None
            fence = gw.ClientFrame.FenceTrajectory(
                trajectory_id="t", generation=self.generation, keep_keys=list(self.calls)
            )
            self.stream.up.append(gw.ClientFrame.Event(fence_trajectory=fence))
            for call in self.calls.values():
                self.send(call)
        elif kind == "started":
            call = self.calls.get(event.started.key)
            if call is not None:
                call.start.last_instance_id = event.started.instance_id
                call.start.last_attempt = max(call.start.last_attempt, event.started.attempt)
        elif kind == "result":
            self.result(event.result.key, event.result.final)

    def result(self, key: str, result: tool.Final) -> None:
        call = self.calls.get(key)
        if call is None:
            return
        self.world.on_result(self, key, result)
        call.results_seen += 1
        if call.result is None:
            call.result = result

    def snapshot(self) -> ro.Snapshot:
        """What the trainer stores at a park: pending calls by key, with what is needed to rejoin them."""
        pending = []
        for key, call in self.calls.items():
            entry = ro.PendingCall(
                key=key,
                tool=call.start.tool,
                args_json=call.start.args_json,
                args_sha256=call.start.args_sha256,
                remaining_ms=call.deadline - self.world.now,
                instance_id=call.start.last_instance_id,
                last_attempt=call.start.last_attempt,
                age_ms=self.world.now - call.first_sent if call.first_sent is not None else 0,
            )
            if call.result is not None:
                entry.result.CopyFrom(call.result)
            pending.append(entry)
        return ro.Snapshot(pending=pending)

    def restore(self, snapshot: ro.Snapshot, held_ms: int) -> None:
        for entry in snapshot.pending:
            self.new_call(entry.key, entry.tool)
            call = self.calls[entry.key]
            call.deadline = self.world.now + entry.remaining_ms - held_ms
            # The snapshot may be older than the last Started, so a pending call always may have been sent.
            call.first_sent = self.world.now - entry.age_ms - held_ms
            call.start.last_instance_id = entry.instance_id
            call.start.last_attempt = entry.last_attempt
            if entry.HasField("result"):
                call.result = entry.result
