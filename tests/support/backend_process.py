"""A tool backend written by hand against tool.proto, without the SDK: proof that the contract suffices, and the real
process behind the gateway's tests.

    python tests/support/backend_process.py --port 0 --ledger FILE [--without invoke_stream,attach,cancel] [--token T]

Every start of a tool's code appends one JSON line {key, tool, instance, pid} to the execution ledger, so a test can see
what really ran, whatever the gateway believes. Tools run in tasks of their own: a cut connection does not end them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from fermata.v1 import tool_pb2, tool_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "seconds": {"type": "number"},
        "bytes": {"type": "integer"},
        "chunks": {"type": "integer"},
    },
    "additionalProperties": False,
}


def spec(name: str, *, idempotent: bool, **fields: Any) -> tool_pb2.ToolSpec:
    return tool_pb2.ToolSpec(
        name=name,
        description=f"the test tool {name}",
        input_schema_json=json.dumps(SCHEMA).encode(),
        idempotent=idempotent,
        visibility=fields.pop("visibility", tool_pb2.VISIBILITY_MODEL),
        version_hash=fields.pop("version_hash", "1"),
        **fields,
    )


@dataclass
class Entry:
    """One key of the journal."""

    digest: bytes
    events: list[tool_pb2.CallEvent] = field(default_factory=list)
    final: tool_pb2.Final | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def tell(self, event: tool_pb2.CallEvent) -> None:
        self.events.append(event)
        self.changed.set()
        self.changed = asyncio.Event()


class HandMadeBackend(tool_pb2_grpc.ToolBackendServiceServicer):
    """Describe, Invoke, InvokeStream, Attach with tombstones, Cancel; a journal in memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.instance_id = f"hand-{os.getpid()}-{time.time_ns():x}"
        self.started_at = time.monotonic()
        self.ledger: Path = options.ledger
        self.features = [f for f in ("invoke_stream", "attach", "cancel") if f not in options.without.split(",")]
        self.journal: dict[str, Entry] = {}
        self.tombstones: set[str] = set()
        self.refuse = set(filter(None, options.refuse.split(",")))
        version = options.version
        self.tools = [
            spec("echo", idempotent=True, version_hash=version),
            spec("pay", idempotent=False, version_hash=version, max_concurrency=options.room),
            spec("hang", idempotent=False, version_hash=version, timeout_fault=tool_pb2.FAULT_MODEL),
            spec("one", idempotent=True, version_hash=version, max_concurrency=1),
            spec("short", idempotent=True, version_hash=version, max_output_bytes=10),
            spec("grade", idempotent=True, version_hash=version, visibility=tool_pb2.VISIBILITY_GRADER),
        ]
        for tool in self.tools:
            if tool.name in options.broken.split(","):
                tool.input_schema_json = b'{"type":'

    def uptime_ms(self) -> int:
        return int((time.monotonic() - self.started_at) * 1000)

    async def Describe(self, request: tool_pb2.DescribeRequest, context: Any) -> tool_pb2.DescribeResponse:
        return tool_pb2.DescribeResponse(
            protocol_minor=1,
            features=self.features,
            instance_id=self.instance_id,
            journal=tool_pb2.Journal(durability=tool_pb2.DURABILITY_MEMORY, retention_ms=600_000),
            tools=self.tools,
            uptime_ms=self.uptime_ms(),
            software="hand-made test backend",
        )

    async def Invoke(self, request: tool_pb2.InvokeRequest, context: Any) -> tool_pb2.InvokeResponse:
        taken = self.take(request.invocation)
        if isinstance(taken, tool_pb2.Final):
            return tool_pb2.InvokeResponse(final=taken, instance_id=self.instance_id)
        while taken.final is None:
            await taken.changed.wait()
        return tool_pb2.InvokeResponse(final=taken.final, instance_id=self.instance_id)

    async def InvokeStream(
        self, request: tool_pb2.InvokeStreamRequest, context: Any
    ) -> AsyncIterator[tool_pb2.InvokeStreamResponse]:
        joined = request.invocation.key in self.journal
        taken = self.take(request.invocation)
        if isinstance(taken, tool_pb2.Final):
            yield tool_pb2.InvokeStreamResponse(event=tool_pb2.CallEvent(final=taken))
            return
        async for event in self.follow(taken, joined, request.invocation.heartbeat_timeout_ms):
            yield tool_pb2.InvokeStreamResponse(event=event)

    async def Attach(self, request: tool_pb2.AttachRequest, context: Any) -> AsyncIterator[tool_pb2.AttachResponse]:
        absent = tool_pb2.AttachResponse.Absent(instance_id=self.instance_id, uptime_ms=self.uptime_ms())
        if request.expected_instance_id and request.expected_instance_id != self.instance_id:
            absent.instance_mismatch = True
            yield tool_pb2.AttachResponse(absent=absent)
            return
        entry = self.journal.get(request.key)
        if entry is None:
            if request.if_absent == tool_pb2.AttachRequest.IF_ABSENT_TOMBSTONE:
                self.tombstones.add(request.key)
            absent.tombstoned = request.key in self.tombstones
            yield tool_pb2.AttachResponse(absent=absent)
            return
        async for event in self.follow(entry, True, request.heartbeat_timeout_ms):
            yield tool_pb2.AttachResponse(event=event)

    async def Cancel(self, request: tool_pb2.CancelRequest, context: Any) -> tool_pb2.CancelResponse:
        self.note({"cancel": request.key, "reason": request.reason})
        entry = self.journal.get(request.key)
        if entry is None:
            return tool_pb2.CancelResponse(state=tool_pb2.CancelResponse.CANCEL_STATE_NOT_FOUND)
        if entry.final is not None:
            return tool_pb2.CancelResponse(state=tool_pb2.CancelResponse.CANCEL_STATE_ALREADY_DONE)
        if entry.task is not None:
            entry.task.cancel()
        return tool_pb2.CancelResponse(state=tool_pb2.CancelResponse.CANCEL_STATE_STOPPING)

    def take(self, invocation: tool_pb2.Invocation) -> Entry | tool_pb2.Final:
        """The journal's entry, new or old, or why there is none."""
        if invocation.expected_instance_id not in ("", self.instance_id):
            return refused(tool_pb2.OUTCOME_NOT_STARTED, "meant for another instance")
        entry = self.journal.get(invocation.key)
        if entry is not None:
            if entry.digest != invocation.args_sha256:
                return refused(tool_pb2.OUTCOME_KEY_CONFLICT, "the key was used with other arguments")
            return entry
        if invocation.key in self.tombstones:
            return refused(tool_pb2.OUTCOME_NOT_STARTED, "tombstoned")
        if invocation.must_exist:
            return refused(tool_pb2.OUTCOME_NOT_STARTED, "not known here")
        if invocation.tool in self.refuse:
            return refused(tool_pb2.OUTCOME_OVERLOADED, "refuses this tool")
        if hashlib.sha256(invocation.args_json).digest() != invocation.args_sha256:
            return refused(tool_pb2.OUTCOME_PROTOCOL, "the digest is not of the arguments")
        entry = self.journal[invocation.key] = Entry(invocation.args_sha256)
        entry.task = asyncio.create_task(self.run(entry, invocation))
        return entry

    async def run(self, entry: Entry, invocation: tool_pb2.Invocation) -> None:
        """The tool's own code."""
        self.note({"key": invocation.key, "tool": invocation.tool})
        args = json.loads(invocation.args_json)
        final = tool_pb2.Final(started=tool_pb2.STARTED_YES)
        try:
            for number in range(args.get("chunks", 0)):
                data = f"part {number};".encode()
                entry.tell(tool_pb2.CallEvent(chunk=tool_pb2.CallEvent.Chunk(offset=number * 7, data=data)))
                entry.tell(tool_pb2.CallEvent(progress=tool_pb2.CallEvent.Progress(fraction=number / args["chunks"])))
            if invocation.tool == "hang":
                await asyncio.Event().wait()
            await asyncio.sleep(args.get("seconds", 0))
            text = args.get("text", "").encode() + b"x" * args.get("bytes", 0)
            final.outcome, final.fault = tool_pb2.OUTCOME_OK, tool_pb2.FAULT_NONE
            final.parts.append(tool_pb2.ContentPart(text=text, mime="text/plain"))
            final.total_bytes = len(text)
        except asyncio.CancelledError:
            final.outcome, final.fault = tool_pb2.OUTCOME_CANCELLED, tool_pb2.FAULT_CALLER
        entry.final = final
        entry.tell(tool_pb2.CallEvent(final=final))

    async def follow(self, entry: Entry, joined: bool, heartbeat_ms: int) -> AsyncIterator[tool_pb2.CallEvent]:
        """All events from the first on, with heartbeats while nothing happens."""
        accepted = tool_pb2.CallEvent.Accepted(
            instance_id=self.instance_id, joined=joined, durability=tool_pb2.DURABILITY_MEMORY
        )
        yield tool_pb2.CallEvent(accepted=accepted)
        at = 0
        while True:
            while at < len(entry.events):
                yield entry.events[at]
                at += 1
            if entry.final is not None:
                return
            try:
                async with asyncio.timeout(heartbeat_ms / 3000 if heartbeat_ms else None):
                    await entry.changed.wait()
            except TimeoutError:
                yield tool_pb2.CallEvent(heartbeat=tool_pb2.CallEvent.Heartbeat())

    def note(self, line: dict[str, Any]) -> None:
        data = json.dumps(line | {"instance": self.instance_id, "pid": os.getpid()}).encode() + b"\n"
        descriptor = os.open(self.ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def refused(outcome: tool_pb2.Outcome, detail: str) -> tool_pb2.Final:
    return tool_pb2.Final(outcome=outcome, fault=tool_pb2.FAULT_INFRA, started=tool_pb2.STARTED_NO, detail=detail)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--without", default="", help="features not offered")
    parser.add_argument("--refuse", default="", help="tools answered OVERLOADED, not started")
    parser.add_argument("--broken", default="", help="tools whose schema is none")
    parser.add_argument("--room", type=int, default=0, help="max_concurrency of pay; 0: no bound")
    parser.add_argument("--version", default="1", help="version_hash of the tools")
    options = parser.parse_args()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)))
    backend = HandMadeBackend(options)
    tool_pb2_grpc.add_ToolBackendServiceServicer_to_server(backend, server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("fermata.v1.ToolBackendService", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port(f"{options.host}:{options.port}")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sys.stdout.write(json.dumps({"ready": True, "port": port, "instance_id": backend.instance_id}) + "\n")
    sys.stdout.flush()
    await stop.wait()
    await servicer.enter_graceful_shutdown()
    await server.stop(0.5)


if __name__ == "__main__":
    asyncio.run(main())
