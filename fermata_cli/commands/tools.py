"""`fermata tools`: one call through a gateway, and the list of what it serves.

Invariant: the output of a tool is all that reaches stdout; control characters in it are escaped where stdout is a
terminal, and never touched where it is a file or a pipe.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fermata.v1 import gateway_pb2, tool_pb2

from fermata_cli.runtime import find_gateway, load_runtime
from fermata_cli.text import printable
from node_runtime.errors import EXIT_CHECK_FAILED, EXIT_OK, EXIT_UNAVAILABLE, EXIT_USAGE, NodeError
from node_runtime.keys import CallKey
from node_runtime.outcomes import fault_name, outcome_name
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client import Result, ToolGateway, wait_for_gateway

_WRONG_CALL = (tool_pb2.OUTCOME_INVALID_ARGS, tool_pb2.OUTCOME_UNKNOWN_TOOL, tool_pb2.OUTCOME_PARSE_ERROR)
_TERMINAL_CHARACTERS = 1_000_000


def call_tool(
    tool: str,
    arguments: str,
    *,
    gateway: str | None,
    deadline_s: float,
    wait_s: float,
    as_json: bool,
    config: Path | None,
    overrides: Sequence[str],
) -> int:
    """0: OK; 1: the tool failed; 2: there is no such tool, or the arguments are not its; 3: infrastructure."""
    runtime = load_runtime(config, overrides)
    gateway = gateway or find_gateway(config, overrides)
    args_json = sys.stdin.buffer.read() if arguments == "-" else arguments.encode("utf-8", "surrogateescape")
    _must_be_json(args_json)
    result = asyncio.run(_call(tool, args_json, gateway, deadline_s, wait_s, runtime))
    if as_json:
        print(json.dumps(_as_json(result), ensure_ascii=False))
    elif not _is_sentence_only(result):
        _write_output(result)
    print(_ending(result), file=sys.stderr)
    if result.outcome == tool_pb2.OUTCOME_OK:
        return EXIT_OK
    if result.outcome in _WRONG_CALL:
        return EXIT_USAGE
    return EXIT_CHECK_FAILED if result.fault in (tool_pb2.FAULT_MODEL, tool_pb2.FAULT_CALLER) else EXIT_UNAVAILABLE


def _must_be_json(args_json: bytes) -> None:
    """A quoting slip in a shell is told here, in the words of a shell's user; all else is the gateway's to judge."""
    try:
        json.loads(args_json)
    except (ValueError, RecursionError) as error:
        raise NodeError(
            f'the arguments are no JSON ({error}): write them in single quotes, as in \'{{"expression": "2*3"}}\'',
            EXIT_USAGE,
        ) from None


async def _call(
    tool: str, args_json: bytes, address: str, deadline_s: float, wait_s: float, runtime: RuntimeSettings
) -> Result:
    await _reach(address, runtime, wait_s)
    run_id = f"cli-{secrets.token_hex(6)}"
    key = CallKey(run_id, "call", 0, 0, 0)
    async with ToolGateway([address], runtime=runtime, run_id=run_id, node_id=run_id) as client:
        await client.wait_connected(wait_s)
        result = await client.call(key=key, tool=tool, args_json=args_json, deadline_s=deadline_s)
        client.release([key])
        return result


async def _reach(address: str, runtime: RuntimeSettings, wait_s: float) -> gateway_pb2.ListToolsResponse:
    def say(sentence: str) -> None:
        print(f"fermata: {sentence}", file=sys.stderr)

    return await wait_for_gateway(address, runtime, timeout_s=wait_s, on_wait=say)


def _write_output(result: Result) -> None:
    text = result.text
    if sys.stdout.isatty():
        print(printable(text, _TERMINAL_CHARACTERS, keep_lines=True))
        return
    sys.stdout.buffer.write(text if not text or text.endswith(b"\n") else text + b"\n")
    sys.stdout.buffer.flush()


def _is_sentence_only(result: Result) -> bool:
    """No tool said it: what stands where output would is the sentence that `_ending` tells."""
    return not result.attempts and bool(result.final.detail)


def _ending(result: Result) -> str:
    final = result.final
    words = [outcome_name(result.outcome)]
    if result.fault == tool_pb2.FAULT_INFRA:
        words.append("the infrastructure failed")
    words += [f"attempt {result.attempts}", f"{result.run_us / 1e6:.3f} s"] if result.attempts else ["never started"]
    if final.truncated:
        words.append(f"cut, {final.total_bytes} bytes in all")
    detail = f": {printable(final.detail, 500)}" if final.detail else ""
    return ", ".join(words) + detail


def _as_json(result: Result) -> dict[str, Any]:
    final = result.final
    structured: Any = None
    if final.structured_json:
        structured = json.loads(final.structured_json)
    return {
        "tool": result.tool,
        "outcome": outcome_name(result.outcome),
        "fault": fault_name(result.fault),
        "text": result.text.decode("utf-8", "backslashreplace"),
        "structured": structured,
        "detail": final.detail,
        "attempts": result.attempts,
        "instance": result.instance_id,
        "queue_seconds": result.queue_us / 1e6,
        "run_seconds": result.run_us / 1e6,
        "truncated": final.truncated,
        "total_bytes": final.total_bytes,
    }


def list_tools(
    *, gateway: str | None, wait_s: float, as_json: bool, config: Path | None, overrides: Sequence[str]
) -> int:
    """One line a tool: name, backends serving of all, description; or one JSON object."""
    runtime = load_runtime(config, overrides)
    gateway = gateway or find_gateway(config, overrides)
    response = asyncio.run(_reach(gateway, runtime, wait_s))
    entries = sorted(response.tools, key=lambda entry: entry.spec.name)
    if as_json:
        print(json.dumps({"tools": [_entry(entry) for entry in entries]}, ensure_ascii=False))
        return EXIT_OK
    width = max((len(entry.spec.name) for entry in entries), default=0)
    for entry in entries:
        serving = f"{entry.backends_serving}/{entry.backends}"
        print(f"{printable(entry.spec.name):{width}}  {serving:>5}  {printable(entry.spec.description, 120)}")
    if not entries:
        print(f"fermata: the gateway at {gateway} serves no tool yet: see its gateway.pools", file=sys.stderr)
    return EXIT_OK


def _entry(entry: gateway_pb2.CatalogueEntry) -> dict[str, Any]:
    spec = entry.spec
    return {
        "name": spec.name,
        "description": spec.description,
        "parameters": json.loads(spec.input_schema_json or b"{}"),
        "idempotent": spec.idempotent,
        "backends": entry.backends,
        "backends_serving": entry.backends_serving,
    }
