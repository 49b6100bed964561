"""Real processes for the gateway's tests: gateways, backends and a TCP proxy that can be cut; always ended.

Invariant: nothing started here outlives the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client import CallOptions, ClientOptions, Result, ToolGateway

REPOSITORY = Path(__file__).resolve().parents[3]
HAND_MADE = REPOSITORY / "tests" / "support" / "backend_process.py"
BY_NAME = REPOSITORY / "tests" / "support" / "gateway_with_names.py"


class Process:
    """One started process and what its ready line said."""

    def __init__(
        self, process: asyncio.subprocess.Process, ready: dict[str, Any], stderr: Path, host: str = "127.0.0.1"
    ) -> None:
        self.process = process
        self.ready = ready
        self.stderr = stderr
        self.port: int = ready["port"]
        self.address = f"{host}:{self.port}"

    def log(self) -> str:
        return self.stderr.read_text()

    async def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        await self.process.wait()

    async def terminate(self, within_s: float = 20.0) -> int:
        self.process.terminate()
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def exit_code(self, within_s: float = 20.0) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()


class Proxy:
    """Forwards TCP to `target`; ``cut`` breaks every connection, ``refuse`` keeps new ones out, and with ``swallow``
    nothing reaches the target."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.refuse = False
        self.swallow = False
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        try:
            onward_reader, onward_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, onward_writer}
        self._writers |= pair
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pump(reader, onward_writer, lambda: self.swallow))
                tasks.create_task(_pump(onward_reader, writer))
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallow: Callable[[], bool] = lambda: False
) -> None:
    try:
        while data := await reader.read(1 << 16):
            if not swallow():
                writer.write(data)
                await writer.drain()
    except OSError:
        pass  # cut on purpose
    finally:
        writer.transport.abort()


class World:
    """Starts processes in a test's folder and ends them with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = folder / "executions.jsonl"
        self.names = folder / "names.json"
        self._processes: list[Process] = []
        self._proxies: list[Proxy] = []

    async def backend(self, *arguments: str, port: int = 0, host: str = "127.0.0.1") -> Process:
        words = [str(HAND_MADE), "--ledger", str(self.ledger), "--host", host, "--port", str(port), *arguments]
        return await self._start(words, host)

    async def sdk_backend(self, *arguments: str, port: int = 0, host: str = "127.0.0.1") -> Process:
        at = ("--set", f"backend.host={host}", "--set", f"backend.port={port}")
        return await self._start(["-m", "tool_backend", *arguments, *at], host)

    async def gateway(self, pools: Sequence[Sequence[str]] = (), *settings: str, port: int = 0) -> Process:
        """One pool per list of addresses."""
        named = json.dumps([{"name": f"pool{n}", "addresses": list(pool)} for n, pool in enumerate(pools)])
        return await self.start_gateway(f"gateway.port={port}", f"gateway.pools={named}", *settings)

    async def start_gateway(self, *pairs: str) -> Process:
        return await self._start(["-m", "tool_gateway", *(word for pair in pairs for word in ("--set", pair))])

    async def gateway_by_name(self, pools: str, *settings: str) -> Process:
        """The pools as YAML; their names are looked up in what ``give`` said last."""
        pairs = ["gateway.port=0", f"gateway.pools={pools}", "runtime.metrics_port=0", *settings]
        words = [str(BY_NAME), str(self.names), *(word for pair in pairs for word in ("--set", pair))]
        return await self._start(words)

    def give(self, **names: list[str]) -> None:
        """What each name resolves to from now on; a name that is not given is not known."""
        draft = self.names.with_suffix(".draft")
        draft.write_text(json.dumps(names))
        draft.replace(self.names)

    async def proxy(self, target: str) -> Proxy:
        proxy = Proxy(target)
        await proxy.start()
        self._proxies.append(proxy)
        return proxy

    async def _start(self, arguments: list[str], host: str = "127.0.0.1") -> Process:
        stderr = self.folder / f"stderr-{len(self._processes)}.txt"
        with stderr.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY), "EXECUTIONS": str(self.ledger)},
            )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(30):
                line = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise AssertionError(f"no ready line: {stderr.read_text()}") from None
        if not line:
            await process.wait()
            raise AssertionError(f"the process ended: {stderr.read_text()}")
        started = Process(process, json.loads(line), stderr, host)
        self._processes.append(started)
        return started

    async def close(self) -> None:
        for proxy in self._proxies:
            await proxy.close()
        for started in self._processes:
            if started.process.returncode is None:
                started.thaw()
                started.process.kill()
                await started.process.wait()

    def notes(self) -> list[dict[str, Any]]:
        if not self.ledger.exists():
            return []
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]

    def starts(self, tool: str | None = None) -> Counter[str]:
        """How often each key's tool really began."""
        return Counter(n["key"] for n in self.notes() if "key" in n and (tool is None or n["tool"] == tool))

    def cancels(self) -> list[str]:
        return [note["cancel"] for note in self.notes() if "cancel" in note]

    async def until_started(self, keys: Iterable[str], within_s: float = 20.0) -> None:
        wanted = set(keys)
        await until(lambda: wanted <= set(self.starts()), within_s)


async def until(holds: Any, within_s: float = 20.0) -> None:
    """Looks at a fact outside this process (a file another one writes) until it holds; the look is the bound."""
    async with asyncio.timeout(within_s):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def client(*addresses: str, options: ClientOptions | None = None, **fields: Any) -> AsyncIterator[ToolGateway]:
    fields.setdefault("runtime", RuntimeSettings())
    fields.setdefault("run_id", "run")
    fields.setdefault("node_id", "node")
    async with ToolGateway(addresses, options=options, **fields) as gateway:
        yield gateway


async def call(
    gateway: ToolGateway,
    key: str,
    tool: str = "echo",
    deadline_s: float = 20.0,
    options: CallOptions | None = None,
    on_event: Any = None,
    **arguments: Any,
) -> Result:
    return await gateway.call(
        key=key,
        tool=tool,
        args_json=json.dumps(arguments).encode(),
        deadline_s=deadline_s,
        options=options,
        on_event=on_event,
    )


async def scrape(port: int) -> str:
    """What /metrics shows on this port."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    try:
        async with asyncio.timeout(10):
            return (await reader.read()).decode()
    finally:
        writer.close()


async def value(port: int, name: str, **labels: str) -> float:
    """One sample of /metrics: the sum over the labels that are not named, 0.0 where there is none."""
    families = text_string_to_metric_families((await scrape(port)).partition("\r\n\r\n")[2])
    samples = (sample for family in families for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


async def until_shown(port: int, low: float, high: float, name: str, **labels: str) -> None:
    """Looks until the sum of these samples lies between the two."""
    async with asyncio.timeout(20):
        while True:
            if low <= await value(port, name, **labels) <= high:
                return
            await asyncio.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
