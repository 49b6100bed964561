"""A gateway, its ledger and its streams: the takeover rules."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fermata.v1 import gateway_pb2 as gw
from fermata.v1 import tool_pb2 as tool

from tests.property.contract.backend import Rpc
from tests.property.contract.messages import CALL_TIMEOUT_MS, MAX_ATTEMPTS, infra

if TYPE_CHECKING:
    from tests.property.contract.node import Node
    from tests.property.contract.world import World


@dataclass
class Attempt:
    instance_id: str
    disproved: bool = False


@dataclass
class Record:
    """What a ledger holds of one call."""

    start: gw.ClientFrame.CallStart
    deadline: int
    owner: tuple[int, str, int]  # generation, session, epoch
    attempts: list[Attempt] = field(default_factory=list)
    first_attempt: int = 1
    result: tool.Final | None = None
    # An attempt that no ledger holds may have started it: NOT_STARTED can never be said.
    unrecorded: bool = False

    def never_started(self) -> bool:
        return not self.unrecorded and all(attempt.disproved for attempt in self.attempts)


class Ledger:
    """Call state with compare-and-set on the owner. Shared by gateways, or lost with one (`World.shared_ledger`)."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.generations: dict[str, int] = {}

    def owns(self, key: str, owner: tuple[int, str, int]) -> bool:
        record = self.records.get(key)
        return (
            record is not None
            and record.owner == owner
            and owner[0] >= self.generations.get(record.start.trajectory_id, 0)
        )


class Stream:
    """One Attach stream: two queues. When it is cut, what lies in them is lost."""

    def __init__(self, node: Node, gateway: Gateway, epoch: int) -> None:
        self.node, self.gateway, self.epoch = node, gateway, epoch
        self.up: deque[gw.ClientFrame.Event] = deque()
        self.down: deque[gw.ServerFrame.Event] = deque()
        self.alive = True
        self.welcome_sent = 0


class Gateway:
    def __init__(self, world: World, name: str, incarnation: str, ledger: Ledger) -> None:
        self.world, self.name, self.incarnation, self.ledger = world, name, incarnation, ledger
        self.alive = True
        self.streams: dict[str, Stream] = {}  # session -> current stream
        self.known: dict[str, tuple[int, str, int]] = {}  # key -> the owner for whom this process works on it
        self.takeovers: dict[str, Takeover] = {}
        self.waiting: set[str] = set()
        self.seq = itertools.count(1)

    # -- the stream
    def receive(self, stream: Stream, event: gw.ClientFrame.Event) -> None:
        kind = event.WhichOneof("event")
        session = stream.node.session_id
        if kind == "hello":
            older = self.streams.get(session)
            if older is not None and older is not stream:
                older.alive = False
            self.streams[session] = stream
            stream.welcome_sent = self.world.now
            stream.down.append(gw.ServerFrame.Event(welcome=gw.ServerFrame.Welcome(incarnation=self.incarnation)))
        elif kind == "call_start":
            self.call_start(stream, event.call_start)
        elif kind == "fence_trajectory":
            self.fence(event.fence_trajectory)
        elif kind == "release":
            for key in event.release.keys:
                record = self.ledger.records.get(key)
                if record is not None and record.result is not None:
                    del self.ledger.records[key]

    def fence(self, fence: gw.ClientFrame.FenceTrajectory) -> None:
        held = self.ledger.generations.get(fence.trajectory_id, 0)
        self.ledger.generations[fence.trajectory_id] = max(held, fence.generation)

    def call_start(self, stream: Stream, start: gw.ClientFrame.CallStart) -> None:
        owner = (start.generation, stream.node.session_id, stream.epoch)
        if start.generation < self.ledger.generations.get(start.trajectory_id, 0):
            self.send_result(stream, start.key, infra(tool.OUTCOME_FENCED))
            return
        self.ledger.generations[start.trajectory_id] = start.generation
        record = self.ledger.records.get(start.key)
        if record is not None and record.start.args_sha256 != start.args_sha256:
            self.send_result(stream, start.key, infra(tool.OUTCOME_KEY_CONFLICT))
            return
        if record is not None and record.owner[1] == owner[1] and record.owner[2] > owner[2]:
            return  # an older stream of this session speaks late
        if record is not None:
            mine = start.key in self.known and record.owner == self.known[start.key]
            record.owner = self.known[start.key] = owner
            if record.result is not None:
                self.send_result(stream, start.key, record.result)
            elif not mine:
                self.take_over(record)
            return
        remaining = start.total_timeout_ms if start.HasField("total_timeout_ms") else CALL_TIMEOUT_MS
        record = Record(start, self.world.now + remaining, owner, first_attempt=start.last_attempt + 1)
        record.unrecorded = start.resend and self.world.idempotent(start.tool)
        self.ledger.records[start.key] = record
        self.known[start.key] = owner
        stream.down.append(gw.ServerFrame.Event(accepted=gw.ServerFrame.Accepted(key=start.key)))
        if start.resend and not self.world.idempotent(start.tool):
            age_bound = start.age_ms + self.world.now - stream.welcome_sent
            self.take_over_unrecorded(record, self.world.now - age_bound)
        elif start.mode == gw.ClientFrame.CallStart.MODE_JOIN_ONLY:
            self.end(record, infra(tool.OUTCOME_INDETERMINATE))
        else:
            self.dispatch(record)

    def send_result(self, stream: Stream, key: str, result: tool.Final) -> None:
        message = gw.ServerFrame.Result(seq=next(self.seq), key=key, final=result)
        stream.down.append(gw.ServerFrame.Event(result=message))

    # -- attempts
    def mine(self, record: Record) -> bool:
        key = record.start.key
        return self.ledger.records.get(key) is record and self.ledger.owns(key, self.known.get(key, (0, "", 0)))

    def dispatch(self, record: Record, prefer: str = "") -> None:
        """Commit attempt -> instance, then invoke there. Waits where no backend is up."""
        key = record.start.key
        if record.result is not None or not self.mine(record):
            return
        instances = self.world.instances()
        if not instances:
            self.waiting.add(key)
            return
        self.waiting.discard(key)
        tried = {attempt.instance_id for attempt in record.attempts}
        fresh = [name for name in instances if name not in tried] or instances
        chosen = prefer if prefer in instances else fresh[len(record.attempts) % len(fresh)]
        record.attempts.append(Attempt(chosen))
        number = record.first_attempt + len(record.attempts) - 1
        stream = self.streams.get(record.owner[1])
        if stream is not None and stream.alive:
            started = gw.ServerFrame.Started(key=key, attempt=number, instance_id=chosen)
            stream.down.append(gw.ServerFrame.Event(started=started))
        self.invoke(record, chosen, number)

    def invoke(self, record: Record, instance_id: str, number: int) -> None:
        self.call(
            instance_id,
            tool.Invocation(
                key=record.start.key,
                attempt=number,
                tool=record.start.tool,
                args_json=record.start.args_json,
                args_sha256=record.start.args_sha256,
                expected_instance_id=instance_id,
            ),
        )

    def call(self, instance_id: str, request: tool.Invocation | tool.AttachRequest) -> None:
        self.world.rpcs.append(Rpc(self, instance_id, request))

    def attach(self, key: str, instance_id: str) -> None:
        record = self.ledger.records[key]
        if instance_id not in self.world.instances():
            self.lost(record, instance_id)
            return
        self.call(
            instance_id,
            tool.AttachRequest(
                key=key,
                args_sha256=record.start.args_sha256,
                expected_instance_id=instance_id,
                if_absent=tool.AttachRequest.IF_ABSENT_TOMBSTONE,
            ),
        )

    def on_response(self, rpc: Rpc) -> None:
        key = rpc.request.key
        record = self.ledger.records.get(key)
        if record is None or record.result is not None or not self.mine(record):
            return
        takeover = self.takeovers.get(key)
        if takeover is not None and isinstance(rpc.request, tool.AttachRequest):
            takeover.answered(rpc)
            return
        response = rpc.response
        assert response is not None
        if isinstance(response, tool.Final):
            if response.started == tool.STARTED_NO:
                self.disproved(record, rpc.instance_id)
            else:
                self.end(record, response)
        elif response.tombstoned:
            self.disproved(record, rpc.instance_id)
        else:
            self.lost(record, rpc.instance_id)

    def on_broken(self, rpc: Rpc) -> None:
        """The connection ended before an answer: the call may be running. Rejoin there, or find out that it is gone."""
        key = rpc.request.key
        record = self.ledger.records.get(key)
        if record is None or record.result is not None or not self.mine(record):
            return
        takeover = self.takeovers.get(key)
        if takeover is not None and isinstance(rpc.request, tool.AttachRequest):
            takeover.failed()
            return
        self.attach(key, rpc.instance_id)

    def disproved(self, record: Record, instance_id: str) -> None:
        for attempt in record.attempts:
            if attempt.instance_id == instance_id:
                attempt.disproved = True
        if not self.world.idempotent(record.start.tool) and not all(a.disproved for a in record.attempts):
            self.lost(record, next(a.instance_id for a in record.attempts if not a.disproved))
        elif len(record.attempts) < MAX_ATTEMPTS:
            self.dispatch(record)
        elif record.never_started():
            self.end(record, infra(tool.OUTCOME_NOT_STARTED, tool.STARTED_NO))
        else:
            self.end(record, infra(tool.OUTCOME_INDETERMINATE))

    def lost(self, record: Record, instance_id: str) -> None:
        """The instance that may have run the call is gone."""
        if self.world.idempotent(record.start.tool) and len(record.attempts) < MAX_ATTEMPTS:
            self.dispatch(record)
        else:
            self.end(record, infra(tool.OUTCOME_INDETERMINATE))

    def end(self, record: Record, result: tool.Final) -> None:
        if record.result is not None or not self.mine(record):
            return
        record.result = result
        self.takeovers.pop(record.start.key, None)
        self.waiting.discard(record.start.key)
        stream = self.streams.get(record.owner[1])
        if stream is not None and stream.alive:
            self.send_result(stream, record.start.key, result)

    def take_over(self, record: Record) -> None:
        """Another gateway, or an earlier owner, worked on it; the ledger says where it may have started."""
        open_attempts = [a for a in record.attempts if not a.disproved]
        if not open_attempts:
            self.dispatch(record)
            return
        named = open_attempts[-1].instance_id
        if self.world.named_may_start and named in self.world.instances():
            # The same key joins what runs there, and starts what has never arrived.
            self.invoke(record, named, record.first_attempt + record.attempts.index(open_attempts[-1]))
        else:
            self.attach(record.start.key, named)

    def take_over_unrecorded(self, record: Record, first_sent: int) -> None:
        """No ledger knows it, and it may have started: disprove that everywhere but at the instance chosen."""
        instances = self.world.instances()
        last = record.start.last_instance_id
        if len(instances) < len(self.world.addresses) or (last and last not in instances):
            self.end(record, infra(tool.OUTCOME_INDETERMINATE))
            return
        chosen = last or instances[0]
        takeover = Takeover(self, record, chosen, first_sent, {i for i in instances if i != chosen})
        self.takeovers[record.start.key] = takeover
        if not takeover.old_enough(self.world.backend(chosen).describe().uptime_ms):
            takeover.failed()
            return
        for instance_id in sorted(takeover.others):
            self.attach(record.start.key, instance_id)
        takeover.maybe_start()

    def tick(self) -> None:
        for key in list(self.known):
            record = self.ledger.records.get(key)
            if record is None or record.result is not None or not self.mine(record):
                continue
            if self.world.now >= record.deadline:
                self.end(record, infra(tool.OUTCOME_DEADLINE_EXCEEDED))
            elif key in self.waiting:
                self.dispatch(record)


class Takeover:
    """Tombstones under way for one call that no ledger knows."""

    def __init__(self, gateway: Gateway, record: Record, chosen: str, first_sent: int, others: set[str]) -> None:
        self.gateway, self.record, self.chosen, self.first_sent, self.others = (
            gateway,
            record,
            chosen,
            first_sent,
            others,
        )

    def old_enough(self, uptime_ms: int) -> bool:
        return self.gateway.world.now - uptime_ms < self.first_sent

    def answered(self, rpc: Rpc) -> None:
        if isinstance(rpc.response, tool.Final):
            self.gateway.end(self.record, rpc.response)
            return
        absent = rpc.response
        assert absent is not None
        if not absent.tombstoned or not self.old_enough(absent.uptime_ms):
            self.failed()
            return
        self.others.discard(rpc.instance_id)
        self.maybe_start()

    def maybe_start(self) -> None:
        if not self.others:
            del self.gateway.takeovers[self.record.start.key]
            if self.chosen in self.gateway.world.instances():
                self.gateway.dispatch(self.record, prefer=self.chosen)
            else:
                self.gateway.end(self.record, infra(tool.OUTCOME_INDETERMINATE))

    def failed(self) -> None:
        self.gateway.end(self.record, infra(tool.OUTCOME_INDETERMINATE))
