"""One attach stream at the server: a reader, a writer and a watchdog, for as long as the stream is the session's own.

Invariant: exactly one task reads and one writes; whatever ends first ends all three, and the session is detached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.logs import get_logger
from tool_gateway.dispatcher import Dispatcher
from tool_gateway.hub import Attached, SessionHub, goodbye
from tool_gateway.ledger import LedgerUnavailable
from tool_gateway.metrics import STREAMS_ACTIVE
from tool_gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

_log = get_logger(__name__)
ClientFrame = gateway_pb2.ClientFrame
ServerFrame = gateway_pb2.ServerFrame
MISSED_PINGS = 3
MIN_FRAME_BYTES = 4096
HELLO_TIMEOUT_S = 10.0
EVENTS_AT_ONCE = 256
GOODBYE_TIMEOUT_S = 1.0


class AttachStream:
    """Serves one stream from its Hello to its end."""

    def __init__(
        self,
        settings: GatewaySettings,
        hub: SessionHub,
        dispatcher: Dispatcher,
        welcome: gateway_pb2.ServerFrame.Welcome,
        context: ServicerContext[ClientFrame, ServerFrame],
    ) -> None:
        self._settings = settings
        self._hub = hub
        self._dispatcher = dispatcher
        self._welcome = welcome
        self._context = context
        self._wake = asyncio.Event()
        self._goodbye: asyncio.Future[ServerFrame.Goodbye] = asyncio.get_running_loop().create_future()
        self._heard = asyncio.Event()
        self._epoch = 0
        self._frame_bytes = settings.limits.frame_bytes

    def end(self, goodbye: ServerFrame.Goodbye) -> None:
        """End the stream: what is ready goes first, the goodbye last."""
        if not self._goodbye.done():
            self._goodbye.set_result(goodbye)

    async def serve(self, catalogue: Callable[[], ServerFrame.Catalogue]) -> None:
        """`catalogue` is asked once the session is attached: from then on changes are told to it."""
        STREAMS_ACTIVE.inc()
        try:
            first = await self._first_frame()
            if first is None:
                return
            hello = first.events[0].hello
            self._epoch = hello.epoch
            if hello.max_frame_bytes:
                self._frame_bytes = min(self._frame_bytes, max(hello.max_frame_bytes, MIN_FRAME_BYTES))
            attached = self._hub.attach(hello, self._wake.set, self.end)
            if isinstance(attached, ServerFrame.Goodbye):
                _log.info("a stream was refused", client=hello.node_id, why=attached.detail)
                await self._say_goodbye(attached)
                return
            try:
                await self._serve_session(attached[0], attached[1], hello, first, catalogue)
            finally:
                self._hub.detach(attached[0], hello.epoch, asyncio.get_running_loop().time())
        finally:
            STREAMS_ACTIVE.dec()

    async def _first_frame(self) -> ClientFrame | None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):  # ends the stream itself when it fires: nothing reads on
                frame = await self._context.read()
        except TimeoutError:
            return None
        if not isinstance(frame, ClientFrame):
            return None
        if not frame.events or frame.events[0].WhichOneof("event") != "hello":
            await self._say_goodbye(_protocol("the first event of a stream must be Hello"))
            return None
        return frame

    async def _serve_session(
        self,
        attached: Attached,
        resumed: bool,
        hello: ClientFrame.Hello,
        first: ClientFrame,
        catalogue: Callable[[], ServerFrame.Catalogue],
    ) -> None:
        session = attached.session
        same_incarnation = hello.incarnation == self._welcome.incarnation
        if resumed and same_incarnation:
            self._dispatcher.ack(attached, hello.resume_from_seq)
        else:
            if same_incarnation:
                # The session was forgotten here, not there: what the client counts as seen must not be said again.
                session.next_seq = max(session.next_seq, hello.resume_from_seq + 1)
            results = await self._dispatcher.unacknowledged(session)
            if session.epoch != self._epoch:
                return  # fenced meanwhile
            session.renumber(results)
        await self._greet(attached, resumed, catalogue)
        if session.epoch != self._epoch:
            return
        log = _log.bind(client=session.node_id, session=session.session_id, epoch=hello.epoch)
        log.info("stream attached", resumed=resumed)
        del first.events[0]
        writer = asyncio.create_task(self._write(attached), name=f"write {session.session_id}")
        tasks = {
            asyncio.create_task(self._read(attached, first), name=f"read {session.session_id}"),
            writer,
            asyncio.create_task(self._watch(), name=f"watch {session.session_id}"),
        }
        try:
            waited: set[asyncio.Future[Any]] = {*tasks, self._goodbye}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._goodbye.done():
                # The writer says it: a write that is cut off would take the goodbye with it.
                self._wake.set()
                await asyncio.wait({writer}, timeout=GOODBYE_TIMEOUT_S)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception) and not _is_disconnect(end):
                log.error("a stream failed inside the gateway", exc_info=end)
        log.info("stream ended", why=self._goodbye.result().detail if self._goodbye.done() else "the client left")

    async def _greet(self, attached: Attached, resumed: bool, catalogue: Callable[[], ServerFrame.Catalogue]) -> None:
        records = await self._dispatcher.ledger.list_session(attached.session.session_id)
        if attached.session.epoch != self._epoch:
            return  # fenced meanwhile
        welcome = ServerFrame.Event()
        welcome.welcome.CopyFrom(self._welcome)
        welcome.welcome.resumed = resumed
        most = self._settings.limits.frame_bytes // 2
        for record in records:
            if record.run_id != attached.session.run_id:
                continue  # of another run that chose the same session id
            most -= len(record.key) + 4
            if most < 0:
                welcome.welcome.known_calls_truncated = True
                break
            welcome.welcome.known_calls.append(record.key)
        attached.welcomed_at = asyncio.get_running_loop().time()
        attached.say(welcome)
        attached.say(ServerFrame.Event(catalogue=catalogue()))
        if self._dispatcher.draining:
            attached.say(ServerFrame.Event(drain=ServerFrame.Drain(reason="the gateway is leaving")))

    async def _read(self, attached: Attached, first: ClientFrame) -> None:
        """Until the client closes its half or says goodbye."""
        frame: ClientFrame | object = first
        while isinstance(frame, ClientFrame) and attached.session.epoch == self._epoch:
            self._heard.set()
            for number, event in enumerate(frame.events, start=1):
                if number % EVENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)  # a frame of millions is not to hold up the other streams
                if not await self._handle(attached, event):
                    return
            frame = await self._context.read()

    async def _handle(self, attached: Attached, event: ClientFrame.Event) -> bool:
        """False: the stream ends."""
        dispatcher = self._dispatcher
        match event.WhichOneof("event"):
            case "call_start":
                if attached.unaccepted >= 2 * self._settings.limits.credits:
                    self.end(
                        _protocol(
                            f"{attached.unaccepted} calls are unaccepted and {self._settings.limits.credits} were "
                            "granted: wait for Accepted before sending more"
                        )
                    )
                    return True
                dispatcher.submit(attached, event.call_start)
            case "cancel":
                dispatcher.cancel(attached, event.cancel.key, event.cancel.reason)
            case "result_ack":
                dispatcher.ack(attached, event.result_ack.seq)
            case "release":
                await dispatcher.release(attached, event.release)
            case "fence_trajectory":
                try:
                    await dispatcher.fence(attached, event.fence_trajectory)
                except LedgerUnavailable as problem:
                    self.end(goodbye(tool_pb2.OUTCOME_OVERLOADED, str(problem)))
                    return False  # what follows, a ping above all, must not be answered as if the fence stood
            case "window":
                attached.session.add_window(event.window.add_bytes, self._settings.limits.window_bytes)
                self._wake.set()
            case "ping":
                attached.say(ServerFrame.Event(pong=ServerFrame.Pong(nonce=event.ping.nonce)))
            case "goodbye":
                if event.goodbye.final:
                    dispatcher.cancel_session(attached, event.goodbye.reason or "the client said goodbye")
                    self._hub.forget(attached.session.session_id)
                return False
            case "hello":
                self.end(_protocol("a stream has one Hello: open another stream to attach again"))
            case _:
                pass  # an event of a newer client: what it needs it negotiates by features
        return True

    async def _write(self, attached: Attached) -> None:
        session, limit = attached.session, self._frame_bytes
        while True:
            await self._wake.wait()
            self._wake.clear()
            # A fenced stream must not take what was meant for its successor.
            while session.epoch == self._epoch and session.ready:
                await self._context.write(ServerFrame(events=session.take(limit)))
            if self._goodbye.done():
                event = ServerFrame.Event(goodbye=self._goodbye.result())
                await self._context.write(ServerFrame(events=[event]))
                return

    async def _watch(self) -> None:
        """Ends when nothing was heard for three heartbeat intervals: the client pings once in each."""
        while True:
            self._heard.clear()
            try:
                async with asyncio.timeout(MISSED_PINGS * self._settings.heartbeat_interval_s):
                    await self._heard.wait()
            except TimeoutError:
                self.end(_protocol(f"nothing was heard for {MISSED_PINGS} heartbeat intervals"))
                return
            await asyncio.sleep(self._settings.heartbeat_interval_s)

    async def _say_goodbye(self, goodbye: ServerFrame.Goodbye) -> None:
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self._context.write(ServerFrame(events=[ServerFrame.Event(goodbye=goodbye)]))
        except (grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError) as error:
            _log.debug("a goodbye did not reach its client", why=str(error))


def _protocol(detail: str) -> ServerFrame.Goodbye:
    return ServerFrame.Goodbye(
        outcome=tool_pb2.OUTCOME_PROTOCOL, fault=tool_pb2.FAULT_INFRA, detail=detail, reconnect=True
    )


def _is_disconnect(error: Exception) -> bool:
    """What reading and writing raise on a stream that is gone."""
    return isinstance(error, grpc.aio.BaseError | asyncio.InvalidStateError)
