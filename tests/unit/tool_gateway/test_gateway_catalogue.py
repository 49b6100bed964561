"""The catalogue: one version per name, bad schemas left out, each complaint once; settings that cannot be."""

from __future__ import annotations

import subprocess
import sys

import pydantic
import pytest
from fermata.v1 import gateway_pb2, tool_pb2

from tool_gateway.calls import CallStart, attempt_timeout_s, read_start, total_timeout_s
from tool_gateway.catalogue import CatalogueBuilder, Described, Tool, unknown_tool_sentence
from tool_gateway.settings import GatewaySettings, LimitSettings, TimeoutSettings


def spec(name: str = "echo", version: str = "1", schema: bytes = b"{}", **fields: int) -> tool_pb2.ToolSpec:
    return tool_pb2.ToolSpec(name=name, version_hash=version, input_schema_json=schema, **fields)


def described(address: str, *tools: tool_pb2.ToolSpec, connected: bool = True, serving: bool = True) -> Described:
    return Described(address, connected, serving, tools)


def test_the_version_most_backends_serve_wins_and_among_equals_the_first() -> None:
    builder = CatalogueBuilder()
    tools, complaints = builder.build([described("a", spec(version="1")), described("b", spec(version="2"))])
    assert tools["echo"].addresses == {"a"}
    assert len(complaints) == 1
    assert "its calls go to version '1' at a only, and not to b" in complaints[0]
    assert builder.build([described("a", spec(version="1")), described("b", spec(version="2"))])[1] == []
    three = [described("a", spec(version="1")), described("b", spec(version="2")), described("c", spec(version="2"))]
    assert builder.build(three)[0]["echo"].addresses == {"b", "c"}
    down = [described("a", spec(version="1"), connected=False), described("b", spec(version="2"))]
    assert builder.build(down)[0]["echo"].addresses == {"b"}


def test_counts_and_what_is_down() -> None:
    tools, _ = CatalogueBuilder().build(
        [described("a", spec()), described("b", spec(), connected=False, serving=False), described("c")]
    )
    entry = tools["echo"].entry()
    assert (entry.backends, entry.backends_serving) == (2, 1)


def test_a_schema_that_cannot_be_used_leaves_the_tool_out_with_one_sentence() -> None:
    tools, complaints = CatalogueBuilder().build([described("a", spec(schema=b"{"), spec("good"))])
    assert set(tools) == {"good"}
    assert complaints[0].startswith("the tool 'echo' of a is left out: the schema")


@pytest.mark.parametrize("name", ["", "two words", "bell\x07", "x" * 1000])
def test_a_name_that_can_be_no_label_leaves_the_tool_out(name: str) -> None:
    builder = CatalogueBuilder()
    tools, complaints = builder.build([described("a", spec(name), spec("good"))])
    assert set(tools) == {"good"}
    assert "a name has 1 to 128 printable characters" in complaints[0]
    assert set(builder.left_out) == {name}
    builder.build([described("a", spec("good"))])
    assert builder.left_out == {}


def test_the_unknown_tool_sentence_names_what_there_is() -> None:
    assert unknown_tool_sentence("x", ["b", "a"]) == "there is no tool 'x'; the tools are: a, b"
    assert unknown_tool_sentence("x", []) == "there is no tool 'x'; there are no tools"


def test_deadlines_come_from_the_caller_then_the_tool_then_the_gateway() -> None:
    timeouts = TimeoutSettings()
    tool = CatalogueBuilder().build([described("a", spec(default_timeout_ms=5000, max_timeout_ms=8000))])[0]["echo"]
    assert isinstance(tool, Tool)
    assert total_timeout_s(CallStart(), None, timeouts) == 60.0
    assert total_timeout_s(CallStart(), tool, timeouts) == 5.0
    assert total_timeout_s(CallStart(total_timeout_ms=7000), tool, timeouts) == 7.0
    assert total_timeout_s(CallStart(total_timeout_ms=10**9), tool, timeouts) == 3600.0
    assert attempt_timeout_s(CallStart(), tool, 60.0, timeouts) == (5.0, False)
    assert attempt_timeout_s(CallStart(attempt_timeout_ms=60_000), tool, 60.0, timeouts) == (8.0, False)
    left, by_deadline = attempt_timeout_s(CallStart(), tool, 4.0, timeouts)
    assert by_deadline
    assert 3.5 < left < 4.0


def test_a_request_that_is_not_a_call_is_one_sentence() -> None:
    limits = LimitSettings(max_args_bytes=4)
    for start, outcome, said in (
        (CallStart(key="nonsense"), tool_pb2.OUTCOME_PROTOCOL, "is not a call key"),
        (CallStart(key="other/t/0/0/0"), tool_pb2.OUTCOME_PERMISSION, "not of this stream's run"),
        (CallStart(key="run/t/0/0/0", args_json=b"12345"), tool_pb2.OUTCOME_INVALID_ARGS, "at most 4 are allowed"),
        (CallStart(key="run/t/0/0/0", args_sha256=b"x" * 32), tool_pb2.OUTCOME_PROTOCOL, "not of its arguments"),
    ):
        read = read_start(start, run_id="run", limits=limits)
        assert read[0] == outcome
        assert isinstance(read[1], str)
        assert said in read[1]
    assert isinstance(gateway_pb2.ClientFrame.CallStart(), CallStart)


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([{"name": "p", "addresses": ["nowhere"]}], "host:port"),
        ([{"name": "p", "addresses": ["a:1", "a:1"]}], "names an address twice"),
        ([{"name": "p", "addresses": ["a:1"]}, {"name": "p", "addresses": ["a:2"]}], "names a pool twice"),
        ([{"name": "p", "addresses": ["a:1"]}, {"name": "q", "addresses": ["a:1"]}], "in two pools"),
    ],
)
def test_pools_that_cannot_be_are_refused(pools: list[object], said: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=said):
        GatewaySettings.model_validate({"pools": pools})


def test_gateway_and_client_import_without_torch_and_vllm() -> None:
    check = (
        "import sys, tool_gateway.process, tool_gateway.client; "
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=50)


def test_the_client_imports_nothing_of_the_server() -> None:
    check = (
        "import sys, tool_gateway.client; "
        "mine = {m for m in sys.modules if m.startswith('tool_gateway.') and not m.startswith('tool_gateway.client')}; "
        "assert not mine, mine"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=50)
