"""A backend process from start to end: tools, settings, server, drain.

Invariant: a call that was accepted is finished or ended with its outcome before the process leaves, within the grace;
the ready line is printed before the first call is accepted and is the only thing on standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

from fermata.v1 import tool_pb2_grpc

from node_runtime import logs, process
from node_runtime.errors import EXIT_OK, NodeError
from node_runtime.grpc_server import NodeServer
from node_runtime.interrupts import interruptible_start
from node_runtime.logs import get_logger
from node_runtime.metrics import start_metrics, stop_metrics
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.settings import Section, load_for_process
from tool_backend.calls import Calls
from tool_backend.loading import BUILT_IN, as_tools, by_name, load_tools
from tool_backend.service import SERVICE_NAME, ToolBackendServicer
from tool_backend.settings import BackendSettings
from tool_backend.stdout import StdoutGuard
from tool_backend.tool import Tool

_log = get_logger(__name__)

SCHEMA: Mapping[str, type[Section]] = {"runtime": RuntimeSettings, "backend": BackendSettings}
PROG = "python -m tool_backend"
_LEAVING_S = 1.5  # of the grace, kept for handing out the last results and closing
_HEARD_S = 0.5  # until gateways have heard that no call is taken any more

ToolSource = Callable[[BackendSettings], Mapping[str, Tool]]


def serve(*tools: Tool | Callable[..., Any], argv: Sequence[str] | None = None) -> NoReturn:
    """Serve tools until the process is told to stop. Takes ``--config`` and ``--set`` from ``argv`` (``sys.argv``).

    ::

        if __name__ == "__main__":
            serve(add, multiply)
    """
    prog = os.path.basename(sys.argv[0]) or PROG
    settings = load_for_process(prog, SCHEMA, argv)
    raise SystemExit(_run(lambda _: by_name(as_tools(list(tools), "serve")), settings))


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m tool_backend NAME... [--config FILE] [--set KEY=VALUE]...``; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    names, options = split_arguments(arguments)
    if not names and not {"-h", "--help"} & set(options):
        usage = f"usage: {PROG} NAME... [--config FILE] [--set KEY=VALUE]..."
        sys.stderr.write(f"{usage}\ntool_backend: name at least one tool: {', '.join(BUILT_IN)}, or module:object\n")
        return 2
    settings = load_for_process(f"{PROG} NAME...", SCHEMA, options)
    return _run(lambda backend: load_tools(names, backend), settings)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of tools, and the options with their values."""
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[])
    parsed, rest = parser.parse_known_args(arguments)
    names = [word for word in rest if not word.startswith("-")]
    options = [word for word in rest if word.startswith("-")]
    if parsed.config is not None:
        options += ["--config", parsed.config]
    for pair in parsed.set:
        options += ["--set", pair]
    return names, options


def _run(source: ToolSource, settings: Mapping[str, Section]) -> int:
    runtime = cast(RuntimeSettings, settings["runtime"])
    backend = cast(BackendSettings, settings["backend"])
    interruptible_start("tool_backend")  # tools may import for seconds
    guard = StdoutGuard()
    guard.install()
    logs.configure(runtime, "tool_backend")
    try:
        tools = source(backend)
    except NodeError as error:
        sys.stderr.write(f"tool_backend: {error}\n")
        return error.exit_code

    async def backend_process(lifetime: process.Lifetime) -> None:
        await _serve(lifetime, tools, backend, guard)

    return process.run(backend_process, runtime, process="tool_backend")


async def _serve(
    lifetime: process.Lifetime, tools: Mapping[str, Tool], settings: BackendSettings, guard: StdoutGuard
) -> None:
    runtime = lifetime.runtime
    calls = Calls(tools, settings, instance_id=new_instance_id())
    server = NodeServer(runtime, settings.host, settings.port, what="tool backend")
    tool_pb2_grpc.add_ToolBackendServiceServicer_to_server(ToolBackendServicer(calls, settings.journal), server.server)
    server.register(SERVICE_NAME)
    metrics_port = start_metrics(runtime, lifetime.health)
    try:
        port = await server.start()
        _log.info("serving", tools=sorted(tools), host=settings.host, port=port, instance_id=calls.instance_id)
        with guard.real_stdout():
            lifetime.ready(port=port, metrics_port=metrics_port, instance_id=calls.instance_id, tools=sorted(tools))
        calls.open()
        await lifetime.stopping.wait()
        await _leave(calls, server, runtime.shutdown_grace_s)
    finally:
        stop_metrics(metrics_port)


async def _leave(calls: Calls, server: NodeServer, grace_s: float) -> None:
    ends_at = time.monotonic() + grace_s
    calls.drain()
    for service in (SERVICE_NAME, ""):
        await server.set_serving(service, False)
    heard_at = time.monotonic() + min(_HEARD_S, grace_s / 4)
    if not await calls.wait_idle(max(grace_s - _LEAVING_S, grace_s / 2)):
        for call in calls.abandon():
            _log.warning("a call did not end in time", tool=call.tool.name, key=call.key)
    # What was sent before its gateway had heard is refused as not started; of a server that stops nobody could tell.
    await asyncio.sleep(max(0.0, heard_at - time.monotonic()))
    # Results that are ready go out now; who still waits for nothing is let go.
    await server.stop(max(0.1, min(1.0, (ends_at - time.monotonic()) / 2)))
    if stubborn := await calls.close(max(0.0, min(0.2, ends_at - time.monotonic()))):
        _log.warning("functions ignore their cancellation; leaving without them", tools=stubborn)
        sys.stderr.flush()
        # A task or thread that does not stop would hold the interpreter's own end up for ever.
        os._exit(EXIT_OK)


def new_instance_id() -> str:
    """A name for this process that none before or after it has."""
    return f"{time.time_ns():x}-{secrets.token_hex(6)}"
