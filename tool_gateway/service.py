"""The gRPC face of the gateway: Attach, ListTools and GetCall. Invariant: no state of its own but the open streams."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from fermata.v1 import gateway_pb2, gateway_pb2_grpc, tool_pb2

from tool_gateway.backends import Backends
from tool_gateway.dispatcher import Dispatcher
from tool_gateway.hub import SessionHub
from tool_gateway.ledger import CallRecord, Gone, LedgerUnavailable
from tool_gateway.settings import GatewaySettings
from tool_gateway.stream import AttachStream

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

SERVICE = "fermata.v1.ToolGatewayService"
PROTOCOL_MINOR = 1
ClientFrame = gateway_pb2.ClientFrame
ServerFrame = gateway_pb2.ServerFrame
_OFFERED = (tool_pb2.VISIBILITY_UNSPECIFIED, tool_pb2.VISIBILITY_MODEL, tool_pb2.VISIBILITY_GRADER)


class GatewayService(gateway_pb2_grpc.ToolGatewayServiceServicer):
    """See gateway.proto."""

    def __init__(
        self,
        settings: GatewaySettings,
        gateway_id: str,
        incarnation: str,
        backends: Backends,
        hub: SessionHub,
        dispatcher: Dispatcher,
    ) -> None:
        self._settings = settings
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._backends = backends
        self._hub = hub
        self._dispatcher = dispatcher

    # The stubs know the iterator form only; this is the read/write form.
    async def Attach(  # type: ignore[override]
        self, request_iterator: object, context: ServicerContext[ClientFrame, ServerFrame]
    ) -> None:
        stream = AttachStream(self._settings, self._hub, self._dispatcher, self._welcome(), context)
        await stream.serve(self.catalogue)

    async def ListTools(
        self,
        request: gateway_pb2.ListToolsRequest,
        context: ServicerContext[gateway_pb2.ListToolsRequest, gateway_pb2.ListToolsResponse],
    ) -> gateway_pb2.ListToolsResponse:
        wanted = tuple(request.visibility) or _OFFERED
        entries = [tool.entry() for tool in self._backends.tools.values() if tool.spec.visibility in wanted]
        return gateway_pb2.ListToolsResponse(tools=entries, version=self._backends.version)

    async def GetCall(
        self,
        request: gateway_pb2.GetCallRequest,
        context: ServicerContext[gateway_pb2.GetCallRequest, gateway_pb2.GetCallResponse],
    ) -> gateway_pb2.GetCallResponse:
        try:
            record = await self._dispatcher.ledger.load(request.key)
        except LedgerUnavailable as problem:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(problem))
        if record is None:
            return gateway_pb2.GetCallResponse(found=False, detail=f"the key {request.key} is not known here")
        if isinstance(record, Gone):
            return gateway_pb2.GetCallResponse(found=True, state=record.state)
        return describe_call(record, request.include_output, asyncio.get_running_loop().time())

    def catalogue(self) -> ServerFrame.Catalogue:
        """What clients are told: tools for models and graders."""
        entries = [tool.entry() for tool in self._backends.tools.values() if tool.spec.visibility in _OFFERED]
        return ServerFrame.Catalogue(tools=entries, version=self._backends.version)

    async def tell_catalogue(self) -> None:
        """Sends the catalogue to all streams whenever it changes, until cancelled."""
        told = self._backends.version
        while True:
            if self._backends.version == told:
                await self._backends.changed.wait()
                continue
            told = self._backends.version
            event = ServerFrame.Event(catalogue=self.catalogue())
            for attached in self._hub.streams:
                attached.say(event)

    def _welcome(self) -> ServerFrame.Welcome:
        settings = self._settings
        return ServerFrame.Welcome(
            protocol_minor=PROTOCOL_MINOR,
            gateway_id=self._gateway_id,
            incarnation=self._incarnation,
            credits=settings.limits.credits,
            heartbeat_interval_ms=int(settings.heartbeat_interval_s * 1000),
            resume_window_ms=int(settings.resume_window_s * 1000),
            max_frame_bytes=settings.limits.frame_bytes,
            durability=self._dispatcher.ledger.durability,
        )


def describe_call(record: CallRecord, include_output: bool, now: float) -> gateway_pb2.GetCallResponse:
    """The story of one call. Ages are in milliseconds of the ledger's clock."""
    states = gateway_pb2.GetCallResponse
    if record.done:
        state = states.CALL_STATE_DONE
    else:
        state = states.CALL_STATE_RUNNING if record.attempts else states.CALL_STATE_ACCEPTED
    response = gateway_pb2.GetCallResponse(
        found=True,
        state=state,
        tool=record.tool,
        session_id=record.session_id,
        acked=record.acked,
        received_ms_ago=int((now - record.received_at) * 1000),
        remaining_ms=max(0, int((record.deadline_at - now) * 1000)),
        attempts=[
            states.Attempt(
                attempt=attempt.number,
                instance_id=attempt.instance_id,
                address=attempt.address,
                outcome=attempt.outcome,
                started=attempt.started,
                started_ms_ago=int((now - attempt.started_at) * 1000),
                detail=attempt.detail,
            )
            for attempt in record.attempts
        ],
    )
    if record.done:
        response.result.CopyFrom(record.to_result())
        response.detail = response.result.final.detail
        if not include_output:
            del response.result.final.parts[:]
            response.result.final.structured_json = b""
    return response
