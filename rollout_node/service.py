"""`RolloutNodeService.Run`: the trainer's stream.

Owns whose stream it is. Invariants: one trainer at a time, the one with the highest epoch; one task reads and one
writes; losing the stream loses no trajectory (they go on for the reconnect window, and what was not acknowledged is
said again on the next stream of the same trainer process).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
import grpc.aio
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import rollout_pb2_grpc

from node_runtime.keys import InvalidKey, check_id
from node_runtime.logs import get_logger
from rollout_node.loop import NodeLoop
from rollout_node.ports import ToolCaller
from rollout_node.settings import RolloutSettings

PROTOCOL_MINOR = 1
FEATURES = ("suspend", "resume", "grader")
_HELLO_S = 10.0
_CATALOGUE_S = 5.0  # Welcome waits so long for a gateway to tell its tools
_CATALOGUE_TICK_S = 0.02
# Events that may wait for a slow trainer before its requests are no longer read.
_EVENTS_PER_TRAJECTORY = 3
_EVENTS_SLACK = 1024

log = get_logger("rollout_node.service")

Context = grpc.aio.ServicerContext[pb.RunRequest, pb.RunResponse]


@dataclass(slots=True, eq=False)
class _Session:
    """One stream and what ends it from outside."""

    run_id: str
    trainer_id: str
    epoch: int
    over: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)

    @property
    def identity(self) -> tuple[str, str, int]:
        return self.run_id, self.trainer_id, self.epoch


class RolloutNodeServicer(rollout_pb2_grpc.RolloutNodeServiceServicer):
    def __init__(
        self,
        settings: RolloutSettings,
        loop: NodeLoop,
        callers: Callable[[str], Awaitable[ToolCaller]],
        *,
        node_id: str,
        incarnation: str,
    ) -> None:
        """`callers` opens (or finds) the gateway client of a run."""
        self._settings = settings
        self._loop = loop
        self._callers = callers
        self._node_id = node_id
        self._incarnation = incarnation
        self._session: _Session | None = None
        self._last: tuple[str, str, int] | None = None
        bound = settings.admission.max_trajectories
        self._most_events = _EVENTS_PER_TRAJECTORY * bound + _EVENTS_SLACK

    async def Run(  # type: ignore[override]  # the stub knows generators only; grpc.aio takes this form too
        self, request_iterator: AsyncIterator[pb.RunRequest], context: Context
    ) -> None:
        hello, rest = await self._read_hello(request_iterator, context)
        session = await self._take_over(hello, context)
        reason = "the stream was cut"
        try:
            caller = await self._callers(session.run_id)
            self._loop.desk.use(session.run_id, caller)
            await self._wait_for_catalogue(caller, session)
            await context.write(pb.RunResponse(events=[pb.RunResponse.Event(welcome=self._welcome(caller))]))
            self._loop.new_stream(session.run_id, same_trainer=session.identity == self._last)
            self._last = session.identity
            log.info("trainer connected", run=session.run_id, trainer=session.trainer_id, epoch=session.epoch)
            reason = await self._serve(session, request_iterator, rest, context)
            if self._session is not session:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        finally:
            if self._session is session:
                self._session = None
                if self._loop.stream.connected:
                    self._loop.stream_lost()
                log.info("trainer's stream ended", run=session.run_id, reason=reason)

    async def leave(self, grace_s: float) -> bool:
        """Drain: finish turns or hand trajectories over within `grace_s`, and let the trainer acknowledge it.

        Returns whether calls run on that another owner may want.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        self._loop.drain(grace_s * 0.7)
        await self._loop.books.none_open()
        if self._session is not None:
            self._loop.outbox.put(pb.RunResponse.Event(load=self._loop.load()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await self._loop.outbox.settled()
            if self._session is not None:
                self._session.end("the node leaves")
        return self._loop.desk.left_running > 0

    # -- hello ------------------------------------------------------------------------------------------------------

    async def _read_hello(
        self, requests: AsyncIterator[pb.RunRequest], context: Context
    ) -> tuple[pb.RunRequest.Hello, list[pb.RunRequest.Event]]:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(requests, None)
        except TimeoutError:
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"no Hello came within {_HELLO_S:g} s")
        if first is None or not first.events or not first.events[0].HasField("hello"):
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the first event of the stream must be Hello")
        hello = first.events[0].hello
        try:
            check_id("Hello.run_id", hello.run_id)
        except InvalidKey as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return hello, list(first.events[1:])

    async def _take_over(self, hello: pb.RunRequest.Hello, context: Context) -> _Session:
        session = _Session(hello.run_id, hello.trainer_id, hello.epoch)
        older = self._session
        if older is not None and older.run_id != session.run_id:
            sentence = f"this node works for run {older.run_id!r}, whose trainer is connected: end that run first"
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, sentence)
        known = self._last if older is None else older.identity
        if known is not None and known[0] == session.run_id:
            if session.epoch < known[2]:
                sentence = f"epoch {session.epoch} of run {session.run_id!r} is over: {known[2]} was here"
                await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, sentence)
            if session.epoch == known[2] and session.trainer_id != known[1]:
                sentence = f"trainers {known[1]!r} and {session.trainer_id!r} of one run both say epoch {session.epoch}"
                await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, sentence)
        self._session = session
        if older is not None:
            older.end(f"a newer stream (epoch {session.epoch}) of the run has taken this one's place")
        return session

    async def _wait_for_catalogue(self, caller: ToolCaller, session: _Session) -> None:
        """A trainer asks only nodes that name its tools, so Welcome waits a little for a gateway that just came up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_CATALOGUE_S, self._settings.catalogue_wait_s)):
                # The catalogue is a mapping that is replaced; there is no event to wait for.
                while not caller.catalogue and not session.over.done():  # noqa: ASYNC110
                    await asyncio.sleep(_CATALOGUE_TICK_S)

    def _welcome(self, caller: ToolCaller) -> pb.RunResponse.Welcome:
        identity = self._loop.books.identity
        return pb.RunResponse.Welcome(
            protocol_minor=PROTOCOL_MINOR,
            features=FEATURES,
            node_id=self._node_id,
            incarnation=self._incarnation,
            model_id=self._settings.model_id,
            model_hash=identity.model_hash,
            tokenizer_hash=identity.tokenizer_hash,
            template_hash=identity.template_hash,
            load=self._loop.load(),
            max_trajectories=self._settings.admission.max_trajectories,
            tools=sorted(caller.catalogue),
        )

    # -- the stream -------------------------------------------------------------------------------------------------

    async def _serve(
        self,
        session: _Session,
        requests: AsyncIterator[pb.RunRequest],
        first: list[pb.RunRequest.Event],
        context: Context,
    ) -> str:
        """Until the trainer ends its side, the stream breaks (cancelled), or a newer one takes its place."""
        reader = asyncio.create_task(self._read(requests, first, session), name="trainer reader")
        writer = asyncio.create_task(self._write(context, session), name="trainer writer")
        loads = asyncio.create_task(self._tell_load(), name="trainer load")
        tasks = (reader, writer, loads)
        try:
            await asyncio.wait((*tasks, session.over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(
                result, grpc.aio.AbortError | asyncio.InvalidStateError
            ):
                log.error("the trainer's stream failed", exc_info=result)
                raise result
        return session.over.result() if session.over.done() else "the trainer ended it"

    async def _read(
        self, requests: AsyncIterator[pb.RunRequest], first: list[pb.RunRequest.Event], session: _Session
    ) -> None:
        for event in first:
            self._take(event, session)
        async for request in requests:
            for event in request.events:
                await self._loop.outbox.below(self._most_events)
                self._take(event, session)
                await asyncio.sleep(0)  # rendering a prompt takes a millisecond; a full frame of them takes turns

    async def _write(self, context: Context, session: _Session) -> None:
        while self._session is session:
            events = await self._loop.outbox.take(self._settings.max_frame_bytes)
            await context.write(pb.RunResponse(events=events))

    async def _tell_load(self) -> None:
        while True:
            self._loop.outbox.put(pb.RunResponse.Event(load=self._loop.load()))
            await asyncio.sleep(self._settings.load_interval_s)

    def _take(self, event: pb.RunRequest.Event, session: _Session) -> None:
        if self._session is not session:
            return  # what a fenced stream still says is not listened to
        match event.WhichOneof("event"):
            case "start":
                self._loop.take_in(event.start)
            case "resume":
                self._loop.take_in(event.resume)
            case "cancel":
                self._loop.cancel(event.cancel.trajectory_id, event.cancel.reason)
            case "ack_snapshot":
                self._loop.acknowledge(event.ack_snapshot)
            case "drain":
                self._loop.drain(event.drain.deadline_ms / 1000)
            case other:
                # A newer trainer's event, or a second Hello: nothing of ours depends on it.
                log.warning("an event was not understood", kind=other or "unknown")


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> NoReturn:
    await context.abort(code, sentence)
    raise AssertionError("abort returned")  # it raises; the type checker does not know
