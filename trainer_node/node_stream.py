"""One rollout node, reached over one `Run` stream that is opened again whenever it ends.

Owns the channel and the stream of one address; everything that is said goes to the listener. Invariants: one task reads
and one task writes; the first event of each stream is Hello; a frame carries every event that is ready; a stream that
says nothing for `silence_timeout_s` is ended, because HTTP/2 keepalive does not notice a hanging event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Protocol

import grpc
import grpc.aio
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import rollout_pb2_grpc

from node_runtime.grpc_channel import open_channel, told_error
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings
from trainer_node.settings import DispatchSettings

PROTOCOL_MINOR = 1
MAX_EVENTS_PER_FRAME = 256

log = get_logger(__name__)


class Listener(Protocol):
    """Who hears what a node says. Called on the event loop, must not block."""

    def on_event(self, address: str, event: pb.RunResponse.Event) -> None: ...
    def on_broken(self, address: str, reason: str) -> None: ...


class NodeStream:
    """`run()` keeps a stream to one node open until it is cancelled."""

    def __init__(
        self,
        address: str,
        settings: DispatchSettings,
        runtime: RuntimeSettings,
        hello: pb.RunRequest.Hello,
        listener: Listener,
        jitter: random.Random,
    ) -> None:
        self.address = address
        self.channel = open_channel(address, runtime)
        self.why_not = "not tried yet"
        self.refused = False  # the node is there, and does not accept this trainer's certificate or token
        self._runtime = runtime
        self._settings = settings
        self._hello = hello
        self._listener = listener
        self._jitter = jitter
        self._outgoing: deque[pb.RunRequest.Event] = deque()
        self._ready = asyncio.Event()
        self._drained = asyncio.Event()
        self._call: grpc.aio.StreamStreamCall[pb.RunRequest, pb.RunResponse] | None = None
        self._welcomed = False

    def send(self, event: pb.RunRequest.Event) -> None:
        """Queue an event for the stream that is open now. An end of the stream drops it: the listener is told."""
        if not self._welcomed:
            return
        if len(self._outgoing) >= self._settings.max_queued_events:
            self._end(f"{len(self._outgoing)} events wait to be written")
            return
        self._outgoing.append(event)
        self._drained.clear()
        self._ready.set()

    def reconnect(self) -> None:
        """End the present stream, so that a new Welcome is said."""
        self._end("asked to connect again")

    async def flushed(self) -> None:
        """Until every queued event has been given to gRPC (or the stream has ended)."""
        if self._outgoing:
            await self._drained.wait()

    async def run(self) -> None:
        """Connect, serve, and connect again after full jitter, doubling. Ends only by cancellation."""
        failures = 0
        try:
            while True:
                spoke = await self._one_stream()
                failures = 0 if spoke else failures + 1
                bound = min(self._settings.reconnect_max_s, self._settings.reconnect_base_s * 2 ** min(failures, 16))
                await asyncio.sleep(self._jitter.uniform(0, bound))
        finally:
            await self.channel.close()

    async def _one_stream(self) -> bool:
        """One stream from Hello to its end. Returns whether the node said Welcome. Failures are told, not raised."""
        self._outgoing.clear()
        self._welcomed = False
        call = rollout_pb2_grpc.RolloutNodeServiceStub(self.channel).Run()
        self._call = call
        writer: asyncio.Task[None] | None = None
        reason, refused = "the node ended the stream", False
        try:
            await call.write(pb.RunRequest(events=[pb.RunRequest.Event(hello=self._hello)]))
            writer = asyncio.create_task(self._write(call), name=f"write {self.address}")
            await self._read(call)
        except grpc.aio.AioRpcError as error:
            reason, refused = await told_error(error, self.address, self._runtime)
        except asyncio.InvalidStateError:
            # What grpc.aio raises for a write on a call that is over.
            reason = "the stream was over"
        except asyncio.CancelledError:
            # Of the RPC by ourselves (_end), not of this task: then go on and connect again.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            reason = self.why_not
        finally:
            # Abandoned aio calls are never collected.
            call.cancel()
            self._call = None
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            self._drained.set()
        welcomed, self._welcomed = self._welcomed, False
        if refused and reason != self.why_not:  # others may serve the run, and then nobody else would tell it
            log.warning("a rollout node does not let this trainer in", address=self.address, reason=reason)
        self.why_not, self.refused = reason, refused
        self._listener.on_broken(self.address, reason)
        return welcomed

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.RunRequest, pb.RunResponse]) -> None:
        loop = asyncio.get_running_loop()
        limit = self._settings.silence_timeout_s
        # Not a timed read, which would end the RPC even where an event is on its way: a timer moved by each frame.
        timer = loop.call_later(limit, self._end, f"it said nothing for {limit:g} s")
        try:
            async for response in call:
                timer.cancel()
                timer = loop.call_later(limit, self._end, f"it said nothing for {limit:g} s")
                for event in response.events:
                    if event.HasField("welcome"):
                        self._welcomed = True
                    self._listener.on_event(self.address, event)
        finally:
            timer.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.RunRequest, pb.RunResponse]) -> None:
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                while self._outgoing:
                    count = min(MAX_EVENTS_PER_FRAME, len(self._outgoing))
                    frame = pb.RunRequest(events=[self._outgoing.popleft() for _ in range(count)])
                    await call.write(frame)
                self._drained.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader sees the same end and tells the reason.
            call.cancel()

    def _end(self, reason: str) -> None:
        if self._call is not None:
            self.why_not = reason
            self._call.cancel()
