"""Real processes around a rollout node, and the trainer's side of its stream.

Invariant: nothing started here outlives the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import rollout_pb2_grpc, tool_pb2

from node_runtime.grpc_channel import open_channel
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.segments import merge

REPOSITORY = Path(__file__).resolve().parents[3]
RUN = "run"


class Process:
    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any], stderr: Path) -> None:
        self.process = process
        self.ready = ready
        self.stderr = stderr

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ready['port']}"

    def log(self) -> str:
        return self.stderr.read_text()

    async def terminate(self, within_s: float = 30.0) -> int:
        self.process.terminate()
        return await self.ended(within_s)

    async def ended(self, within_s: float = 30.0) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[Process] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for started in reversed(self._processes):
            if started.process.returncode is None:
                started.process.kill()
                await started.process.wait()

    async def backend(self, *settings: str) -> Process:
        module = "tests.integration.rollout_node.work_tools:work"
        return await self.start("tool_backend", module, settings=("backend.port=0", *settings))

    async def gateway(self, backends: Sequence[Process], *settings: str) -> Process:
        pools = json.dumps([{"name": f"pool{i}", "addresses": [b.address]} for i, b in enumerate(backends)])
        return await self.start("tool_gateway", settings=("gateway.port=0", f"gateway.pools={pools}", *settings))

    async def node(self, model: Path, gateway: str, *settings: str, within_s: float = 240.0) -> Process:
        return await self.start("rollout_node", settings=node_settings(model, gateway, *settings), within_s=within_s)

    async def start(
        self, module: str, *arguments: str, settings: Sequence[str] = (), within_s: float = 60.0
    ) -> Process:
        """Until the ready line; a process that ends before is an AssertionError with its log."""
        started = await self.launch(module, *arguments, settings=settings)
        assert started.process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                line = await started.process.stdout.readline()
        except TimeoutError:
            raise AssertionError(f"no ready line of {module}: {started.log()[-4000:]}") from None
        assert line, f"{module} ended: {started.log()[-4000:]}"
        started.ready = json.loads(line)
        return started

    async def launch(self, module: str, *arguments: str, settings: Sequence[str] = ()) -> Process:
        stderr = self.folder / f"stderr-{module}-{len(self._processes)}.txt"
        flags = [word for setting in settings for word in ("--set", setting)]
        with stderr.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *arguments, *flags,
                stdout=asyncio.subprocess.PIPE, stderr=errors, cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            )  # fmt: skip
        started = Process(process, {}, stderr)
        self._processes.append(started)
        return started


def node_settings(model: Path, gateway: str, *settings: str) -> tuple[str, ...]:
    return (
        f"rollout.model={model}",
        f"rollout.gateway=[{gateway}]",
        "rollout.engine.serve_before_sync=true",
        "rollout.engine.dtype=float32",
        "rollout.engine.max_model_len=1024",
        "rollout.engine.kv_cache_gib=0.25",
        "rollout.engine.enforce_eager=true",
        "runtime.metrics_port=0",
        *settings,
    )


class Trainer:
    """One Run stream: says, hears, holds snapshots and acknowledges them."""

    def __init__(self, address: str, *, epoch: int = 1, acknowledge: bool = True) -> None:
        self._channel = open_channel(address, RuntimeSettings())
        self._epoch = epoch
        self._acknowledge = acknowledge
        self.welcome = pb.RunResponse.Welcome()
        self.snapshots: dict[str, pb.Snapshot] = {}
        self.ends: dict[str, pb.RunResponse.Event] = {}
        self.events: list[pb.RunResponse.Event] = []
        self._news = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None
        self.error: grpc.aio.AioRpcError | None = None

    async def __aenter__(self) -> Self:
        self._call = rollout_pb2_grpc.RolloutNodeServiceStub(self._channel).Run()
        hello = pb.RunRequest.Hello(run_id=RUN, trainer_id="trainer", epoch=self._epoch)
        await self._call.write(pb.RunRequest(events=[pb.RunRequest.Event(hello=hello)]))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                for event in frame.events:
                    await self._hear(event)
        except grpc.aio.AioRpcError as error:
            self.error = error
        async with self._news:
            self._news.notify_all()

    async def _hear(self, event: pb.RunResponse.Event) -> None:
        kind = event.WhichOneof("event")
        said = getattr(event, kind)
        if kind == "welcome":
            self.welcome = said
        elif kind in ("parked", "finished", "handed_over"):
            held = self.snapshots.get(said.trajectory_id)
            self.snapshots[said.trajectory_id] = merge(held, said.snapshot)
            if self._acknowledge:
                await self.ack(said)
        if kind in ("finished", "failed", "handed_over", "rejected"):
            self.ends[said.trajectory_id] = event
        self.events.append(event)
        async with self._news:
            self._news.notify_all()

    async def ack(self, said: Any, *, stored: bool = True) -> None:
        ack = pb.RunRequest.AckSnapshot(
            trajectory_id=said.trajectory_id,
            generation=said.generation,
            snapshot_seq=said.snapshot.snapshot_seq,
            stored=stored,
        )
        await self.say(ack_snapshot=ack)

    async def say(self, **event: Any) -> None:
        await self._call.write(pb.RunRequest(events=[pb.RunRequest.Event(**event)]))

    async def until(self, holds: Any, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s), self._news:
            await self._news.wait_for(lambda: holds() or self.error is not None)
        assert holds(), f"the stream ended: {self.error}"

    async def end(self, trajectory: str, within_s: float = 60.0) -> pb.RunResponse.Event:
        await self.until(lambda: trajectory in self.ends, within_s)
        return self.ends[trajectory]

    def parked(self) -> set[str]:
        return {e.parked.trajectory_id for e in self.events if e.HasField("parked")}


def start(trajectory: str, **fields: Any) -> pb.RunRequest.Start:
    """Two turns, each of which calls `work`; the second's call is not sent, because no turn follows."""
    values: dict[str, Any] = {
        "run_id": RUN,
        "tools": ["work"],
        "limits": pb.Limits(max_turns=2),
        "sampling": pb.Sampling(temperature=1.0, max_tokens_per_turn=32),
        "deadline_ms": 120_000,
        **fields,
    }
    message = pb.RunRequest.Start(trajectory_id=trajectory, **values)
    message.messages.add(role="user", parts=[tool_pb2.ContentPart(text=f"Work, {trajectory}.".encode())])
    return message
