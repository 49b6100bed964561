"""`fermata tools` against a real gateway with a real backend, whose tools also misbehave."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster.processes import run, services

pytestmark = pytest.mark.integration
ODD = "tests.integration.cluster.odd_tools"


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with services() as start:
        names = [f"{ODD}:{name}" for name in ("raises", "hangs", "rubbish")]
        backend = start("tool_backend", "calculator", *names, "--set", "backend.port=0")
        pools = json.dumps([{"name": "all", "addresses": [f"127.0.0.1:{backend['port']}"]}])
        ready = start("tool_gateway", "--set", "gateway.port=0", "--set", f"gateway.pools={pools}")
        yield f"127.0.0.1:{ready['port']}"


def test_output_is_all_of_stdout(gateway: str, tmp_path: Path) -> None:
    code, out, err = run(
        "tools", "call", "calculator", '{"expression": "12*34"}', "--gateway", gateway, folder=tmp_path
    )
    assert (code, out) == (0, "408\n")
    assert err.startswith("OK, attempt 1, ")
    code, out, _ = run(
        "tools", "call", "calculator", '{"expression": "1/3"}', "--gateway", gateway, "--json", folder=tmp_path
    )
    assert code == 0
    assert json.loads(out)["text"] == "1/3"
    assert json.loads(out)["outcome"] == "OK"


@pytest.mark.parametrize(
    ("tool", "arguments", "code", "words"),
    [
        ("calculator", '{"expression": 3}', 2, "INVALID_ARGS, never started: argument 'expression' must be a string"),
        ("calculator", '"{}"', 2, "INVALID_ARGS"),
        ("calculator", "[1]", 2, "INVALID_ARGS, never started: arguments must be a JSON object"),
        ("calcualtor", "{}", 2, "UNKNOWN_TOOL, never started: there is no tool 'calcualtor'"),
        ("raises", "{}", 1, "TOOL_ERROR, attempt 1"),
        ("hangs", "{}", 3, "did not end within"),
    ],
)
def test_each_end_has_its_exit_code_and_its_sentence(
    tool: str, arguments: str, code: int, words: str, gateway: str, tmp_path: Path
) -> None:
    found, out, err = run("tools", "call", tool, arguments, "--gateway", gateway, "--deadline", "3", folder=tmp_path)
    assert found == code, err
    assert words in err
    assert len(err.splitlines()) == 1
    if code == 2:
        assert out == ""  # no tool said anything
    assert "Traceback" not in err


def test_rubbish_goes_to_a_pipe_untouched(gateway: str, tmp_path: Path) -> None:
    code, out, err = run("tools", "call", "rubbish", "--gateway", gateway, "--json", folder=tmp_path)
    assert code == 0, err
    assert json.loads(out)["text"] == "\x1b]0;owned\x07\\xff\\xfe<|im_end|>\n"


def test_the_list_names_what_is_served(gateway: str, tmp_path: Path) -> None:
    code, out, _ = run("tools", "list", "--gateway", gateway, folder=tmp_path)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["calculator", "hangs", "raises", "rubbish"]
    code, out, _ = run("tools", "list", "--gateway", gateway, "--json", folder=tmp_path)
    assert code == 0
    assert json.loads(out)["tools"][0]["parameters"]["required"] == ["expression"]


def test_a_gateway_that_is_down_is_waited_for_with_a_message(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        code, out, err = run("tools", "call", "x", "--gateway", address, "--wait", "1.5", folder=tmp_path)
    assert (code, out) == (3, "")
    assert f"waiting for a tool gateway at {address}" in err
    assert f"a tool gateway at {address} did not answer within 1.5 s" in err
