"""A rollout node whose trajectories follow a script, on real gRPC: what tests of the trainer's edge talk to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import grpc.aio
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import rollout_pb2_grpc, tool_pb2

from node_runtime.segments import Columns, Version

Script = Callable[["ScriptedNode", pb.RunRequest.Start, pb.Snapshot | None], Awaitable[None]]
Event = pb.RunResponse.Event
VERSION = Version("line", 1)

_incarnations = itertools.count(1)


class ScriptedNode(rollout_pb2_grpc.RolloutNodeServiceServicer):
    """`script(node, start, snapshot)` runs once for each Start (snapshot None) and each Resume."""

    def __init__(
        self,
        script: Script,
        *,
        tools=("calculator",),
        room: int = 0,
        version: Version = VERSION,
        serving: bool = False,
    ) -> None:
        """`serving`: from its start, before any sync."""
        self.script = script
        self.serving = serving
        self.tools = list(tools)
        self.room = room
        self.version = version
        self.address = ""
        self.incarnation = ""
        self.hellos: list[pb.RunRequest.Hello] = []
        self.starts: list[pb.RunRequest.Start] = []
        self.resumes: list[pb.RunRequest.Resume] = []
        self.cancels: list[str] = []
        self.acks: list[pb.RunRequest.AckSnapshot] = []
        self.happened = asyncio.Condition()
        self._welcomed = False
        self._out: asyncio.Queue[Event | None] | None = None
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> str:
        self.incarnation = f"incarnation-{next(_incarnations)}"
        self._welcomed = False
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        rollout_pb2_grpc.add_RolloutNodeServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.address = f"127.0.0.1:{bound}"
        return self.address

    async def kill(self) -> None:
        """At once, with everything it had: as a killed process."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def cut(self) -> None:
        """The stream breaks, the process lives on."""
        if self._out is not None:
            self._out.put_nowait(None)

    def send(self, **event: object) -> None:
        if self._out is not None:
            self._out.put_nowait(Event(**event))

    def keep_talking(self, every_s: float) -> None:
        """Load events, as a real node sends them."""

        async def talk() -> None:
            while True:
                self.send(load=pb.RunResponse.Load(serving=True))
                await asyncio.sleep(every_s)

        task = asyncio.ensure_future(talk())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s), self.happened:
            await self.happened.wait_for(condition)

    async def Run(self, request_iterator, context):
        out: asyncio.Queue[Event | None] = asyncio.Queue()
        self._out = out
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                event = await out.get()
                if event is None:
                    return
                yield pb.RunResponse(events=[event])
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests) -> None:
        async for request in requests:
            for event in request.events:
                self._on(event)
            async with self.happened:
                self.happened.notify_all()

    def _on(self, event: pb.RunRequest.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "hello":
            self.hellos.append(event.hello)
            # As a real node: a new process has no proven weights and serves nothing; the proof tells when it does.
            load = pb.RunResponse.Load(serving=self.serving or self._welcomed)
            self._welcomed = True
            self.send(
                welcome=pb.RunResponse.Welcome(
                    node_id="scripted",
                    incarnation=self.incarnation,
                    load=load,
                    tools=self.tools,
                    max_trajectories=self.room,
                )
            )
        elif kind == "start":
            self.starts.append(event.start)
            self._run(event.start, None)
        elif kind == "resume":
            self.resumes.append(event.resume)
            self._run(event.resume.start, event.resume.snapshot)
        elif kind == "cancel":
            self.cancels.append(event.cancel.trajectory_id)
        elif kind == "ack_snapshot":
            self.acks.append(event.ack_snapshot)

    def _run(self, start: pb.RunRequest.Start, snapshot: pb.Snapshot | None) -> None:
        task = asyncio.ensure_future(self.script(self, start, snapshot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what a script says -----------------------------------------------------------------------------------------

    def key(self, start: pb.RunRequest.Start, turn: int = 0) -> str:
        return f"{start.run_id}/{start.trajectory_id}/{start.generation}/{turn}/0"

    def park(self, start: pb.RunRequest.Start, columns: Columns, key: str, seq: int = 1) -> None:
        snapshot = pb.Snapshot(
            snapshot_seq=seq,
            segments=columns.pack(),
            total_tokens=len(columns),
            pending=[pb.PendingCall(key=key, tool="calculator", remaining_ms=1000)],
        )
        self.send(
            parked=pb.RunResponse.Parked(
                trajectory_id=start.trajectory_id, generation=start.generation, snapshot=snapshot
            )
        )

    def finish(
        self,
        start: pb.RunRequest.Start,
        columns: Columns,
        answer: str,
        *,
        keys=(),
        seq: int = 1,
        base: int = 0,
        reason: int = pb.FINISH_REASON_STOP,
        **fields: object,
    ) -> None:
        snapshot = pb.Snapshot(
            snapshot_seq=seq,
            base_segments=base,
            base_tokens=columns.segments[base - 1].stop if base else 0,
            segments=columns.pack(base),
            total_tokens=len(columns),
        )
        calls = [
            pb.CallSummary(key=key, tool="calculator", outcome=tool_pb2.OUTCOME_OK, fault=tool_pb2.FAULT_NONE)
            for key in keys
        ]
        self.send(
            finished=pb.RunResponse.Finished(
                trajectory_id=start.trajectory_id,
                generation=start.generation,
                snapshot=snapshot,
                reason=reason,
                answer=answer.encode(),
                calls=calls,
                **fields,
            )
        )

    def fail(self, start: pb.RunRequest.Start, outcome: int, *, tool: str = "calculator", keys=()) -> None:
        calls = [pb.CallSummary(key=key, tool=tool, outcome=outcome, fault=tool_pb2.FAULT_INFRA) for key in keys]
        self.send(
            failed=pb.RunResponse.Failed(
                trajectory_id=start.trajectory_id,
                generation=start.generation,
                fault=tool_pb2.FAULT_INFRA,
                outcome=outcome,
                reason="the tool's host is gone",
                tool=tool,
                calls=calls,
            )
        )

    def reject(self, start: pb.RunRequest.Start, retry_after_ms: int) -> None:
        self.send(
            rejected=pb.RunResponse.Rejected(
                trajectory_id=start.trajectory_id,
                generation=start.generation,
                reason="no room",
                retry_after_ms=retry_after_ms,
            )
        )

    def first_turn(self, sampled=(10, 11)) -> Columns:
        columns = Columns()
        columns.append(pb.SEGMENT_KIND_PROMPT, [1, 2, 3])
        columns.append(
            pb.SEGMENT_KIND_MODEL, list(sampled), logprobs=[-1.0] * len(sampled), version=self.version, turn=0
        )
        return columns
