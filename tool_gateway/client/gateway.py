"""The gateway client: the state machine joined to a stream, a clock and the callers' futures.

Invariant: one task owns the connection, with one reader and one writer on each stream; whatever becomes of them,
``ToolGateway.call`` returns its one result by its deadline.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from fermata.v1 import gateway_pb2, gateway_pb2_grpc, tool_pb2

from node_runtime.errors import EXIT_UNAVAILABLE, EXIT_USAGE, NodeError
from node_runtime.grpc_channel import open_channel, told_error
from node_runtime.keys import CallKey
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client.endings import Dead, ended_by
from tool_gateway.client.interface import ToolCaller
from tool_gateway.client.requests import bounded, call_start, local_result
from tool_gateway.client.state import CallStart, CatalogueChanged, ClientState, Effect, Ended, Noticed, Resolved
from tool_gateway.client.types import CallOptions, ClientOptions, OnEvent, Pending, Result

_log = get_logger(__name__)
ClientFrame = gateway_pb2.ClientFrame
ServerFrame = gateway_pb2.ServerFrame
_STATUS_S = 0.5
"""How long the status of an ended stream may take to arrive after a write has failed."""
_GOODBYE_S = 1.0
_REMIND_S = 10.0


@dataclass(slots=True, eq=False)
class _Waiting:
    future: asyncio.Future[Result]
    on_event: OnEvent | None
    callers: int = 1


class ToolGateway:
    """See ``ToolCaller``. Use as an async context manager, inside one event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        runtime: RuntimeSettings,
        run_id: str,
        node_id: str,
        session_id: str | None = None,
        options: ClientOptions | None = None,
    ) -> None:
        """`addresses` are gateways of equal standing: one is used, the others are where to go when it fails."""
        if not addresses:
            raise NodeError("no gateway address is given: name at least one host:port", EXIT_USAGE)
        self._options = options or ClientOptions()
        self._runtime = runtime
        self._addresses = tuple(addresses)
        self._next_address = sum(node_id.encode()) % len(self._addresses)
        self._state = ClientState(
            run_id=run_id,
            node_id=node_id,
            session_id=session_id or f"{node_id}-{secrets.token_hex(8)}",
            options=self._options,
        )
        self._waiting: dict[str, _Waiting] = {}
        self._wake = asyncio.Event()
        self._catalogue: Mapping[str, tool_pb2.ToolSpec] = {}
        self._why = "no connection has been made yet"
        self._refusals: dict[str, NodeError] = {}
        """Gateways that are there and do not let this client in, until one does; or what this side lacks for them."""
        self._opened = False
        """A channel could be made once, so that settings and files were right."""
        self._runner: asyncio.Task[None] | None = None
        self._fenced: str | None = None
        self._failure: NodeError | None = None
        """Why this client can never connect again."""
        self._closing = asyncio.Event()
        self._final_goodbye = True
        self._announce = asyncio.Event()
        self._clock = asyncio.Event()
        """The clock must look again: a nearer deadline has come, or the end."""
        self._reminded_at = float("-inf")
        self.frames_sent = 0
        self.frames_received = 0

    async def __aenter__(self) -> Self:
        self._runner = asyncio.create_task(self._run(), name="gateway client")
        self._runner.add_done_callback(self._runner_ended)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        """A gateway has welcomed this client and the stream is alive."""
        return self._state.welcomed

    @property
    def catalogue(self) -> Mapping[str, tool_pb2.ToolSpec]:
        """Name → spec of the tools the gateway last told of; a new mapping on each change."""
        return self._catalogue

    @property
    def why_disconnected(self) -> str:
        """One sentence on the last connection that failed; empty while connected."""
        return "" if self.connected else self._why

    @property
    def session_id(self) -> str:
        return self._state.session_id

    async def wait_connected(self, timeout_s: float) -> None:
        """Returns once connected. Raises NodeError (EXIT_UNAVAILABLE) saying why it is not: after `timeout_s`, or as
        soon as every gateway refuses this client (its certificate, its token)."""
        await self._wait(lambda: self.connected, timeout_s, lambda: self._why)

    async def wait_for_tools(self, names: Iterable[str], timeout_s: float) -> None:
        """Returns once the catalogue holds all the names. Raises NodeError naming those that nobody serves."""
        wanted = set(names)

        def why() -> str:
            missing = ", ".join(sorted(wanted - set(self._catalogue)))
            known = ", ".join(sorted(self._catalogue)) or "none"
            return f"nobody serves the tools {missing}; the gateway knows: {known}" if self.connected else self._why

        await self._wait(lambda: wanted <= set(self._catalogue), timeout_s, why)

    async def _wait(self, holds: Any, timeout_s: float, why: Any) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    if self._fenced is not None:
                        raise NodeError(self._fenced, EXIT_UNAVAILABLE)
                    if self._failure is not None:
                        raise self._failure
                    if len(self._refusals) == len(set(self._addresses)):
                        told = dict.fromkeys(map(str, self._refusals.values()))
                        raise NodeError("; ".join(told), next(iter(self._refusals.values())).exit_code)
                    self._announce.clear()
                    await self._announce.wait()
        except TimeoutError:
            where = ", ".join(self._addresses)
            raise NodeError(
                f"the tool gateway at {where} was not ready within {timeout_s:g} s: {why()}", EXIT_UNAVAILABLE
            ) from None

    # -- calls -------------------------------------------------------------------------------------------------------

    async def call(
        self,
        *,
        key: CallKey | str,
        tool: str,
        args_json: bytes,
        deadline_s: float,
        on_event: OnEvent | None = None,
        options: CallOptions | None = None,
    ) -> Result:
        """Run one call to its end, within `deadline_s` seconds (30 days at most) whatever becomes of the gateway.

        A second call with a key in flight joins the first (KEY_CONFLICT where its arguments differ). Cancelling the
        last awaiting task cancels the call at the tool. Raises InvalidKey for a malformed key, and nothing else.
        """
        parsed = CallKey.parse(key) if isinstance(key, str) else key
        options = options or CallOptions()
        generation = parsed.generation if options.generation is None else options.generation
        start = call_start(parsed, tool, args_json, options)
        waiting = self._waiting.get(start.key)
        if waiting is None:
            refused = self._refusal(start)
            if refused is not None:
                return refused
            waiting = _Waiting(asyncio.get_running_loop().create_future(), on_event, callers=0)
            self._waiting[start.key] = waiting
            now = self._now()
            self._state.submit(
                start,
                now + bounded(deadline_s),
                (parsed.trajectory_id, generation),
                now - bounded(options.earlier.age_s) if options.earlier is not None else None,
            )
            self._wake.set()
            self._clock.set()
        elif not self._state.same_call(start):
            detail = f"the key {start.key} is in flight for another tool or other arguments"
            return local_result(start, tool_pb2.OUTCOME_KEY_CONFLICT, detail)
        else:
            self._state.adopt(start.key, generation)
        waiting.callers += 1
        try:
            return await asyncio.shield(waiting.future)
        except asyncio.CancelledError:
            if waiting.callers == 1 and not waiting.future.done():
                self._waiting.pop(start.key, None)
                waiting.future.cancel()
                self._state.forget(start.key, "the caller was cancelled")
                self._wake.set()
            raise
        finally:
            waiting.callers -= 1

    def cancel(self, key: CallKey | str, reason: str = "") -> None:
        """Stop a call; its ``call`` returns CANCELLED/CALLER, or the result where that was quicker."""
        self._apply(self._state.cancel(str(key), reason))
        self._wake.set()

    def release(self, keys: Iterable[CallKey | str]) -> None:
        """The caller's side has durably stored these results: the gateway may forget them."""
        self._state.release([str(key) for key in keys])
        self._wake.set()

    def release_trajectory(self, trajectory_id: str, generation: int) -> None:
        """As ``release``, for all calls of the trajectory up to and including `generation`."""
        self._state.release_trajectory(trajectory_id, generation)
        self._wake.set()

    def fence(self, trajectory_id: str, generation: int, keep_keys: Iterable[CallKey | str] = ()) -> None:
        """A new generation owns the trajectory: calls of older ones that are not named are cancelled."""
        self._state.fence(trajectory_id, generation, [str(key) for key in keep_keys])
        self._wake.set()

    def pending(self, trajectory_id: str | None = None) -> list[Pending]:
        """Unresolved calls (of one trajectory), with what a snapshot must know of them."""
        return self._state.pending(self._now(), trajectory_id)

    async def close(self) -> None:
        """Say a final goodbye (what still runs is cancelled at the gateway) and end; calls awaited end CANCELLED."""
        await self._end(final=True)

    async def leave(self) -> None:
        """Say a goodbye that is not final and end: calls run on at the gateway, for the next owner of their
        trajectories to join. Calls awaited here end CANCELLED. Tasks that await calls are to be cancelled afterwards:
        a cancelled caller cancels its call."""
        await self._end(final=False)

    async def _end(self, *, final: bool) -> None:
        self._final_goodbye = final
        self._apply(self._state.close(tool_pb2.OUTCOME_CANCELLED, "the gateway client was closed"))
        self._wake.set()
        self._clock.set()
        self._closing.set()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            try:
                await asyncio.wait({runner}, timeout=2 * _GOODBYE_S)  # its failure has been told by _runner_ended
            finally:
                runner.cancel()
                await asyncio.wait({runner})

    def _refusal(self, start: CallStart) -> Result | None:
        if self._fenced is not None:
            return local_result(start, tool_pb2.OUTCOME_FENCED, self._fenced)
        if self._failure is not None:
            return local_result(start, tool_pb2.OUTCOME_INTERNAL, str(self._failure))
        if self._state.closed:
            return local_result(start, tool_pb2.OUTCOME_CANCELLED, "the gateway client is closed")
        if len(start.args_json) > self._options.max_frame_bytes:
            detail = f"arguments have {len(start.args_json)} bytes, at most {self._options.max_frame_bytes} are sent"
            return local_result(start, tool_pb2.OUTCOME_INVALID_ARGS, detail)
        if len(self._state) >= self._options.max_calls:
            detail = f"{len(self._state)} calls are in flight in this client, its limit"
            return local_result(start, tool_pb2.OUTCOME_OVERLOADED, detail)
        return None

    # -- the connection ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Connect, serve, connect again; until closed."""
        failures = 0
        clock = asyncio.create_task(self._keep_deadlines(), name="gateway client deadlines")
        try:
            while not self._state.closed:
                was_welcomed, wait_s = await self._attach(self._addresses[self._next_address])
                failures = 0 if was_welcomed else failures + 1
                if self._state.closed:
                    return
                self._next_address = (self._next_address + 1) % len(self._addresses)
                ceiling = min(self._options.reconnect_max_s, self._options.reconnect_base_s * 2.0 ** min(failures, 20))
                await self._pause(max(wait_s, random.uniform(0, ceiling)))
        finally:
            clock.cancel()
            await asyncio.wait({clock})

    async def _attach(self, address: str) -> tuple[bool, float]:
        """As ``_connection``. Raises NodeError where a channel cannot be made and never could."""
        try:
            channel = open_channel(address, self._runtime)
            self._opened = True
        except NodeError as error:
            if not self._opened:
                raise
            # Its files are read anew each time, perhaps in the middle of being replaced.
            self._refused(address, error)
            self._lost(address, str(error), False)
            return False, 0.0
        try:
            return await self._connection(address, channel)
        finally:
            await channel.close()

    async def _connection(self, address: str, channel: grpc.aio.Channel) -> tuple[bool, float]:
        """One connection from Hello to its end: whether it was welcomed, and how long the gateway asked to wait."""
        state = self._state
        call = gateway_pb2_grpc.ToolGatewayServiceStub(channel).Attach()
        hello = state.connect(self._now())
        reader = asyncio.create_task(self._read(call), name="gateway client read")
        writer = asyncio.create_task(self._write(call, hello), name="gateway client write")
        watch = asyncio.create_task(self._watch(), name="gateway client watch")
        tasks: tuple[asyncio.Task[Any], ...] = (reader, writer, watch)
        welcomed, wait_s = False, 0.0
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not writer.cancelled() and writer.exception() is not None:
                # A write to a stream that has ended fails without saying why; the reader hears the status.
                await asyncio.wait((reader,), timeout=_STATUS_S)
            welcomed = state.welcomed
            if reader.done() and not reader.cancelled() and reader.exception() is None:
                wait_s = reader.result()
            error = ended_by(*tasks)
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            state.disconnected()
        if not state.closed:
            self._lost(address, await self._told(error, address), welcomed)
        return welcomed, wait_s

    async def _told(self, error: BaseException | None, address: str) -> str:
        if not isinstance(error, grpc.aio.AioRpcError):
            return str(error or "")
        why, refused = await told_error(error, address, self._runtime)
        if refused:
            self._refused(address, NodeError(f"tool gateway: {why}", EXIT_UNAVAILABLE))
        return why

    def _refused(self, address: str, error: NodeError) -> None:
        self._refusals[address] = error
        self._announce.set()

    async def _read(self, call: Any) -> float:
        """Until the stream ends; returns how long the gateway asked to wait before coming back."""
        wait_s = 0.0
        while True:
            frame = await call.read()
            if not isinstance(frame, ServerFrame):
                return wait_s
            self.frames_received += 1
            now = self._now()
            for event in frame.events:
                for effect in self._state.receive(event, now):
                    if isinstance(effect, Ended):
                        wait_s = effect.reconnect_in_s
                        self._why = effect.detail
                        if effect.final:
                            self._be_fenced(effect.detail)
                    else:
                        self._apply((effect,))
                if event.WhichOneof("event") == "welcome":
                    self._why = ""
                    self._refusals.clear()
                    _log.info("gateway attached", gateway=event.welcome.gateway_id, resumed=event.welcome.resumed)
                    self._announce.set()
            self._wake.set()

    async def _write(self, call: Any, hello: ClientFrame.Event) -> None:
        """Everything that is ready, frame by frame; returns when the stream should end."""
        async with asyncio.timeout(self._options.hello_timeout_s):
            await call.write(ClientFrame(events=[hello]))
        state = self._state
        while True:
            if state.closed:
                await self._say_goodbye(call)
                return
            now = self._now()
            if state.may_leave and len(self._addresses) > 1:
                raise Dead("the gateway drains")
            events = state.take(now)
            if events:
                self.frames_sent += 1
                await call.write(ClientFrame(events=events))
                continue
            self._wake.clear()
            try:
                async with asyncio.timeout_at(state.ping_at if state.welcomed else None):
                    await self._wake.wait()
            except TimeoutError:
                continue  # a ping is due

    async def _say_goodbye(self, call: Any) -> None:
        goodbye = ClientFrame.Goodbye(reason="the client was closed", final=self._final_goodbye)
        async with asyncio.timeout(_GOODBYE_S):
            if self._state.welcomed:
                events = [*self._state.take(self._now()), ClientFrame.Event(goodbye=goodbye)]
                await call.write(ClientFrame(events=events))
            await call.done_writing()
            await call.code()  # the gateway ends the stream once it has read the goodbye

    async def _watch(self) -> None:
        """Gives the connection up once the gateway has been silent for too long; a blocked writer could not."""
        while True:
            left = self._state.dead_at - self._now()
            if left <= 0:
                break
            await asyncio.sleep(left)
        raise Dead("the gateway did not answer three pings" if self._state.welcomed else "no Welcome came in time")

    async def _keep_deadlines(self) -> None:
        """Deadlines hold with and without a connection; calls not accepted in time are queued again."""
        while True:
            self._clock.clear()
            self._apply(self._state.tick(self._now()))
            self._wake.set()
            try:
                async with asyncio.timeout_at(self._state.tick_at if self._state.tick_at < math.inf else None):
                    await self._clock.wait()
            except TimeoutError:
                continue  # a timer is due

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past the close."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return

    # -- effects -----------------------------------------------------------------------------------------------------

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Resolved(key, result):
                    waiting = self._waiting.pop(key, None)
                    if waiting is not None and not waiting.future.done():
                        waiting.future.set_result(result)
                case Noticed(key, notice):
                    waiting = self._waiting.get(key)
                    if waiting is not None and waiting.on_event is not None:
                        try:
                            waiting.on_event(notice)
                        except Exception as error:  # noqa: BLE001 (one caller's fault is not the other callers')
                            _log.error("a caller's on_event failed", key=key, exc_info=error)
                case CatalogueChanged(tools):
                    self._catalogue = tools
                    self._announce.set()
                case Ended():
                    pass  # the reader's own

    def _be_fenced(self, detail: str) -> None:
        self._fenced = f"another stream has taken the session {self._state.session_id}: {detail}"
        _log.error(self._fenced)
        self._apply(self._state.close(tool_pb2.OUTCOME_FENCED, self._fenced))
        self._announce.set()

    def _lost(self, address: str, why: str, welcomed: bool) -> None:
        self._why = f"the gateway at {address} is not attached: {why or self._why or 'the stream ended'}"
        now = self._now()
        if welcomed or now - self._reminded_at >= _REMIND_S:
            self._reminded_at = now
            _log.warning(self._why, calls=len(self._state))

    def _runner_ended(self, runner: asyncio.Task[None]) -> None:
        """A fault of ours must not leave callers waiting."""
        if runner.cancelled() or runner.exception() is None:
            return
        error = runner.exception()
        if isinstance(error, NodeError):  # an address that is none, a token or TLS file that cannot be used
            self._failure = error
            _log.error(str(error))
        else:
            self._failure = NodeError(f"the gateway client failed with {type(error).__name__}: {error}")
            _log.error("the gateway client failed", exc_info=error)
        self._apply(self._state.close(tool_pb2.OUTCOME_INTERNAL, str(self._failure)))
        self._announce.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


if TYPE_CHECKING:
    _implements: type[ToolCaller] = ToolGateway
