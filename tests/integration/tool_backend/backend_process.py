"""A real backend process for the tests: started, spoken to over gRPC, and always ended."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from fermata.v1 import tool_pb2, tool_pb2_grpc

from node_runtime.grpc_channel import open_channel
from node_runtime.runtime_settings import RuntimeSettings

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]


class Backend:
    """One running backend and a client for it."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, Any], stderr: Path) -> None:
        self.process = process
        self.ready = ready
        self.address = f"127.0.0.1:{ready['port']}"
        self.instance_id: str = ready["instance_id"]
        self.stderr = stderr
        self.channel: grpc.aio.Channel = open_channel(self.address, RuntimeSettings())
        self.stub: tool_pb2_grpc.ToolBackendServiceAsyncStub = tool_pb2_grpc.ToolBackendServiceStub(self.channel)

    def log(self) -> str:
        """What the process has written to standard error."""
        return self.stderr.read_text()

    async def invoke(self, tool: str, arguments: Any = None, *, key: str, **fields: Any) -> tool_pb2.Final:
        """One unary call."""
        request = tool_pb2.InvokeRequest(invocation=invocation(tool, arguments, key=key, **fields))
        response = await self.stub.Invoke(request, timeout=30)
        assert response.instance_id == self.instance_id
        return response.final

    def stream(self, tool: str, arguments: Any = None, *, key: str, **fields: Any) -> Any:
        """One call with its events."""
        request = tool_pb2.InvokeStreamRequest(invocation=invocation(tool, arguments, key=key, **fields))
        return self.stub.InvokeStream(request, timeout=30)

    async def attach(self, key: str, **fields: Any) -> list[tool_pb2.AttachResponse]:
        """All answers to one Attach."""
        return [answer async for answer in self.stub.Attach(tool_pb2.AttachRequest(key=key, **fields), timeout=30)]

    async def cancel(self, key: str) -> tool_pb2.CancelResponse.CancelState:
        """Cancel a call."""
        response = await self.stub.Cancel(tool_pb2.CancelRequest(key=key, reason="test"), timeout=30)
        return response.state

    async def describe(self) -> tool_pb2.DescribeResponse:
        """What the process says of itself."""
        return await self.stub.Describe(tool_pb2.DescribeRequest(), timeout=30)


def invocation(tool: str, arguments: Any, *, key: str, **fields: Any) -> tool_pb2.Invocation:
    """An invocation as the gateway sends it."""
    args_json = arguments if isinstance(arguments, bytes) else json.dumps(arguments or {}).encode()
    digest = hashlib.sha256(args_json).digest()
    fields.setdefault("args_sha256", digest)
    return tool_pb2.Invocation(key=key, attempt=1, tool=tool, args_json=args_json, **fields)


async def run_to_end(*arguments: str, timeout_s: float = 30.0) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a backend that is expected not to start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tool_backend",
        *arguments,
        cwd=REPOSITORY,
        env=environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def environment() -> dict[str, str]:
    """The environment with the tests' own tools importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FERMATA_")}
    return {**kept, "PYTHONPATH": f"{HERE}{os.pathsep}{kept.get('PYTHONPATH', '')}"}


@contextlib.asynccontextmanager
async def backend(folder: Path, *arguments: str) -> AsyncIterator[Backend]:
    """A backend on a free port, ready; killed at the end where it has not ended by itself."""
    stderr = folder / "stderr.log"
    with stderr.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tool_backend",
            *arguments,
            "--set",
            "backend.port=0",
            cwd=REPOSITORY,
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        assert line, f"it did not start: {stderr.read_text()}"
        running = Backend(process, json.loads(line), stderr)
        try:
            yield running
        finally:
            await running.channel.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
