"""A tool backend with its journal, and one request to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fermata.v1 import tool_pb2 as tool

from tests.property.contract.messages import infra

if TYPE_CHECKING:
    from tests.property.contract.gateway import Gateway
    from tests.property.contract.world import World


@dataclass
class JournalEntry:
    args_sha256: bytes = b""
    state: str = "running"  # running | done | tombstone
    result: tool.Final | None = None
    waiting: list[Rpc] = field(default_factory=list)


class Backend:
    """One process at one address, with a journal in memory. A key that is tombstoned or known never starts again."""

    def __init__(self, world: World, address: str, instance_id: str) -> None:
        self.world, self.address, self.instance_id = world, address, instance_id
        self.born = world.now
        self.journal: dict[str, JournalEntry] = {}

    def describe(self) -> tool.DescribeResponse:
        return tool.DescribeResponse(instance_id=self.instance_id, uptime_ms=self.world.now - self.born)

    def invoke(self, rpc: Rpc, request: tool.Invocation) -> None:
        if request.expected_instance_id != self.instance_id:
            rpc.answer(infra(tool.OUTCOME_NOT_STARTED, tool.STARTED_NO))
            return
        entry = self.journal.get(request.key)
        if entry is None and request.must_exist:
            rpc.answer(infra(tool.OUTCOME_NOT_STARTED, tool.STARTED_NO))
        elif entry is None:
            entry = self.journal[request.key] = JournalEntry(request.args_sha256)
            self.world.starts.append((request.key, self.instance_id))
            entry.waiting.append(rpc)
        elif entry.state == "tombstone":
            rpc.answer(infra(tool.OUTCOME_NOT_STARTED, tool.STARTED_NO))
        elif entry.args_sha256 != request.args_sha256:
            rpc.answer(infra(tool.OUTCOME_KEY_CONFLICT))
        elif entry.result is not None:
            rpc.answer(entry.result)
        else:
            entry.waiting.append(rpc)

    def attach(self, rpc: Rpc, request: tool.AttachRequest) -> None:
        uptime = self.world.now - self.born
        if request.expected_instance_id and request.expected_instance_id != self.instance_id:
            rpc.answer(
                tool.AttachResponse.Absent(instance_id=self.instance_id, instance_mismatch=True, uptime_ms=uptime)
            )
            return
        entry = self.journal.get(request.key)
        if entry is not None and entry.state != "tombstone":
            if entry.result is not None:
                rpc.answer(entry.result)
            else:
                entry.waiting.append(rpc)
            return
        tombstone = request.if_absent == tool.AttachRequest.IF_ABSENT_TOMBSTONE
        if tombstone:
            self.journal[request.key] = JournalEntry(state="tombstone")
        rpc.answer(tool.AttachResponse.Absent(instance_id=self.instance_id, tombstoned=tombstone, uptime_ms=uptime))

    def finish(self, key: str) -> None:
        entry = self.journal[key]
        entry.state = "done"
        entry.result = tool.Final(
            outcome=tool.OUTCOME_OK,
            fault=tool.FAULT_NONE,
            started=tool.STARTED_YES,
            parts=[tool.ContentPart(text=f"{key}@{self.instance_id}".encode())],
        )
        for rpc in entry.waiting:
            rpc.answer(entry.result)
        entry.waiting.clear()

    def running(self) -> list[str]:
        return [key for key, entry in self.journal.items() if entry.state == "running"]


class Rpc:
    """One request from a gateway to a backend instance; request and response can each be late or lost."""

    def __init__(self, gateway: Gateway, instance_id: str, request: tool.Invocation | tool.AttachRequest) -> None:
        self.gateway, self.instance_id, self.request = gateway, instance_id, request
        self.delivered = self.broken = self.done = False
        self.response: tool.Final | tool.AttachResponse.Absent | None = None

    def answer(self, response: tool.Final | tool.AttachResponse.Absent) -> None:
        self.response = response
