"""The client where there is no gateway: odd times, and a connection that can never be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from fermata.v1 import tool_pb2

from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.runtime_settings import RuntimeSettings, TokenSettings
from tool_gateway.client import CallOptions, ToolGateway
from tool_gateway.client.requests import bounded
from tool_gateway.client.types import Earlier


def client(address: str, runtime: RuntimeSettings | None = None) -> ToolGateway:
    return ToolGateway([address], runtime=runtime or RuntimeSettings(), run_id="run", node_id="node")


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [(1.5, 1.5), (0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 2_592_000.0), (1e30, 2_592_000.0)],
)
def test_times_are_bounded_by_what_a_message_can_say(seconds: float, taken: float) -> None:
    assert bounded(seconds) == taken


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
async def test_a_call_without_time_ends_at_once(seconds: float) -> None:
    async with client("127.0.0.1:1") as gateway:
        result = await gateway.call(
            key="run/t/0/0/0",
            tool="echo",
            args_json=b"{}",
            deadline_s=seconds,
            options=CallOptions(earlier=Earlier(age_s=seconds)),
        )
    assert result.outcome == tool_pb2.OUTCOME_DEADLINE_EXCEEDED


async def test_a_connection_that_can_never_be_made_is_told_at_once(tmp_path: Path) -> None:
    gone = tmp_path / "token"
    for address, runtime, word in (
        ("nowhere", RuntimeSettings(), "host:port"),
        ("127.0.0.1:1", RuntimeSettings(tokens=TokenSettings(send_file=gone)), str(gone)),
    ):
        async with client(address, runtime) as gateway:
            with pytest.raises(NodeError, match=word) as raised:
                await gateway.wait_connected(30.0)
            assert raised.value.exit_code == EXIT_USAGE
            result = await gateway.call(key="run/t/0/0/0", tool="echo", args_json=b"{}", deadline_s=30.0)
            assert result.outcome == tool_pb2.OUTCOME_INTERNAL
            assert word in result.final.detail
