"""``ToolBackendService`` on top of the calls: messages in, messages out.

Invariant: whatever became of a call travels in a message body; a gRPC error always means infrastructure.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import grpc.aio
from fermata.v1 import tool_pb2, tool_pb2_grpc

from node_runtime.outcomes import fault_of
from tool_backend.calls import Admission, Calls
from tool_backend.journal import State
from tool_backend.settings import JournalSettings

SERVICE_NAME = tool_pb2.DESCRIPTOR.services_by_name["ToolBackendService"].full_name
PROTOCOL_MINOR = 0
FEATURES = ("invoke_stream", "attach", "cancel")
MIN_HEARTBEAT_S = 0.05

_Events = AsyncGenerator[tool_pb2.CallEvent, None]
_Context = grpc.aio.ServicerContext[Any, Any]


class ToolBackendServicer(tool_pb2_grpc.ToolBackendServiceServicer):
    """The service of one backend process; see protos/fermata/v1/tool.proto for what each method promises."""

    def __init__(self, calls: Calls, journal: JournalSettings) -> None:
        self._calls = calls
        self._journal = journal
        self._up_since = time.monotonic()

    async def Describe(self, request: tool_pb2.DescribeRequest, context: _Context) -> tool_pb2.DescribeResponse:
        """Who this process is and what it serves."""
        return tool_pb2.DescribeResponse(
            protocol_minor=PROTOCOL_MINOR,
            features=FEATURES,
            instance_id=self._calls.instance_id,
            journal=tool_pb2.Journal(
                durability=tool_pb2.DURABILITY_MEMORY,
                retention_ms=round(self._journal.retention_s * 1000),
                max_entries=self._journal.max_entries,
                max_bytes=self._journal.max_bytes,
            ),
            tools=[tool.spec for tool in self._calls.tools.values()],
            uptime_ms=self._uptime_ms(),
            software=_software(),
        )

    async def Invoke(self, request: tool_pb2.InvokeRequest, context: _Context) -> tool_pb2.InvokeResponse:
        """One call, answered when it ended."""
        admission = self._calls.start_or_join(request.invocation)
        final = admission.final if admission.call is None else await admission.call.wait()
        return tool_pb2.InvokeResponse(final=final, instance_id=self._calls.instance_id)

    async def InvokeStream(
        self, request: tool_pb2.InvokeStreamRequest, context: _Context
    ) -> AsyncIterator[tool_pb2.InvokeStreamResponse]:
        """One call with its life made visible."""
        invocation = request.invocation
        heartbeat_s = _heartbeat_s(invocation)
        async with contextlib.aclosing(self._events(self._calls.start_or_join(invocation), heartbeat_s)) as events:
            async for event in events:
                yield tool_pb2.InvokeStreamResponse(event=event)

    async def InvokeMany(self, request_iterator: Any, context: _Context) -> AsyncIterator[tool_pb2.InvokeManyResponse]:
        """Not among the features of this backend: the one method that answers with a gRPC error."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "this backend has no invoke_many; use Invoke or InvokeStream"
        )
        yield tool_pb2.InvokeManyResponse()

    async def Attach(
        self, request: tool_pb2.AttachRequest, context: _Context
    ) -> AsyncIterator[tool_pb2.AttachResponse]:
        """Rejoin a call, or prove that it never started here."""
        absent = tool_pb2.AttachResponse.Absent(instance_id=self._calls.instance_id, uptime_ms=self._uptime_ms())
        expected = request.expected_instance_id
        if expected and expected != self._calls.instance_id:
            absent.instance_mismatch = True
            yield tool_pb2.AttachResponse(absent=absent)
            return
        # From here to the tombstone nothing waits: the key cannot start in between.
        now = time.monotonic()
        state = self._calls.journal.look_up(request.key, request.args_sha256, now).state
        if state in (State.UNKNOWN, State.TOMBSTONED, State.ENDED):
            absent.expired = state is State.ENDED
            absent.tombstoned = state is State.TOMBSTONED
            if state is State.UNKNOWN and request.if_absent == tool_pb2.AttachRequest.IF_ABSENT_TOMBSTONE:
                absent.tombstoned = bool(request.key) and self._calls.journal.tombstone(request.key, now)
            yield tool_pb2.AttachResponse(absent=absent)
            return
        admission = self._calls.known(request.key, request.args_sha256, now)
        assert admission is not None
        async with contextlib.aclosing(self._events(admission, _heartbeat_s(request))) as events:
            async for event in events:
                yield tool_pb2.AttachResponse(event=event)

    async def Cancel(self, request: tool_pb2.CancelRequest, context: _Context) -> tool_pb2.CancelResponse:
        """Stop a running call; one that ended keeps its result."""
        return tool_pb2.CancelResponse(state=self._calls.cancel(request.key, request.reason))

    async def OpenSession(
        self, request: tool_pb2.OpenSessionRequest, context: _Context
    ) -> tool_pb2.OpenSessionResponse:
        """There are no stateful tools here, and the answer says so."""
        return tool_pb2.OpenSessionResponse(status=self._no_sessions(request.epoch))

    async def RenewSession(
        self, request: tool_pb2.RenewSessionRequest, context: _Context
    ) -> tool_pb2.RenewSessionResponse:
        """As OpenSession."""
        return tool_pb2.RenewSessionResponse(status=self._no_sessions(request.epoch))

    async def CloseSession(
        self, request: tool_pb2.CloseSessionRequest, context: _Context
    ) -> tool_pb2.CloseSessionResponse:
        """As OpenSession."""
        return tool_pb2.CloseSessionResponse(status=self._no_sessions(request.epoch))

    async def _events(
        self, admission: Admission, heartbeat_s: float | None
    ) -> AsyncGenerator[tool_pb2.CallEvent, None]:
        if admission.known:
            accepted = tool_pb2.CallEvent.Accepted(
                instance_id=self._calls.instance_id, joined=admission.joined, durability=tool_pb2.DURABILITY_MEMORY
            )
            yield tool_pb2.CallEvent(accepted=accepted)
        if admission.call is None:
            yield tool_pb2.CallEvent(final=admission.final)
            return
        async with contextlib.aclosing(admission.call.events(heartbeat_s)) as events:
            async for event in events:
                yield event

    def _uptime_ms(self) -> int:
        # Rounded down: a claim of having been up for longer than is true could disprove a start that happened.
        return int((time.monotonic() - self._up_since) * 1000)

    def _no_sessions(self, epoch: int) -> tool_pb2.SessionStatus:
        return tool_pb2.SessionStatus(
            outcome=tool_pb2.OUTCOME_PROTOCOL,
            fault=fault_of(tool_pb2.OUTCOME_PROTOCOL),
            detail="sessions are not implemented here: no tool of this backend is stateful; call them without one",
            instance_id=self._calls.instance_id,
            epoch=epoch,
        )


def _heartbeat_s(request: tool_pb2.Invocation | tool_pb2.AttachRequest) -> float | None:
    """How often to be heard: three times within what the caller allows, so that one late event harms nothing."""
    if not request.HasField("heartbeat_timeout_ms"):
        return None
    return max(request.heartbeat_timeout_ms / 3000, MIN_HEARTBEAT_S)


def _software() -> str:
    try:
        return f"fermata-rl/{importlib.metadata.version('fermata-rl')}"
    except importlib.metadata.PackageNotFoundError:
        return "fermata-rl"
