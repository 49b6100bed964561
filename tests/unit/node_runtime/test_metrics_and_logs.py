"""/metrics on its own port, and logs that never touch stdout."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import prometheus_client
import pytest

from node_runtime import logs
from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.metrics import TOOL_BUCKETS, start_metrics, stop_metrics
from node_runtime.runtime_settings import RuntimeSettings


def test_metrics_off() -> None:
    assert start_metrics(RuntimeSettings()) is None
    stop_metrics(None)


def test_metrics_are_served_and_a_port_in_use_is_one_sentence() -> None:
    prometheus_client.Counter("fermata_test_things", "Things of this test.").inc(3)
    port = start_metrics(RuntimeSettings(metrics_port=0))
    assert port
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert "fermata_test_things_total 3.0" in text
        assert "process_resident_memory_bytes" in text
        with pytest.raises(NodeError) as caught:
            start_metrics(RuntimeSettings(metrics_port=port))
        assert str(caught.value).startswith(f"/metrics: port {port} on 127.0.0.1 is in use: choose another")
        assert caught.value.exit_code == EXIT_UNAVAILABLE
    finally:
        stop_metrics(port)
    again = start_metrics(RuntimeSettings(metrics_port=port))
    stop_metrics(again)
    assert again == port


def test_metrics_on_a_host_that_is_not_ours() -> None:
    with pytest.raises(NodeError, match=r"cannot listen on 192\.0\.2\.1:9"):
        start_metrics(RuntimeSettings(metrics_port=9, metrics_host="192.0.2.1"))


def test_buckets_reach_from_a_millisecond_to_five_minutes() -> None:
    assert (TOOL_BUCKETS[0], TOOL_BUCKETS[-1]) == (0.001, 300.0)
    assert list(TOOL_BUCKETS) == sorted(set(TOOL_BUCKETS))


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_json_logs(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(RuntimeSettings(log_format="json", node_name="gateway-0", log_level="info"), "tool_gateway")
    log = logs.get_logger("tool_gateway.pool")
    log.debug("not shown")
    log.info("backend joined", address="127.0.0.1:1", tools=["ä"])
    logging.getLogger("foreign").warning("said %s", "so")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("failed")
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = map(json.loads, err.splitlines())
    assert (first["event"], first["address"], first["tools"]) == ("backend joined", "127.0.0.1:1", ["ä"])
    assert (first["node"], first["logger"], first["level"]) == ("gateway-0", "tool_gateway.pool", "info")
    assert (second["event"], second["logger"], second["level"]) == ("said so", "foreign", "warning")
    assert third["exception"][0]["exc_type"] == "ValueError"


@pytest.mark.usefixtures("root_logger")
def test_console_logs(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(RuntimeSettings(log_level="warning"), "trainer_node")
    logs.configure(RuntimeSettings(log_level="warning"), "trainer_node")
    log = logs.get_logger("x")
    log.info("not shown")
    log.warning("shown", step=3)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("shown") == 1
    assert "step=3" in err
    assert "node=trainer_node" in err


def test_nothing_reaches_stdout_before_configure() -> None:
    program = "from node_runtime.logs import get_logger; get_logger('x').warning('early', a=1)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, env=dict(os.environ), check=True
    )
    assert done.stdout == ""
    assert "early" in done.stderr


def test_node_runtime_imports_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, node_runtime.process, node_runtime.grpc_server, node_runtime.grpc_channel, node_runtime.schema, "
        "node_runtime.spans, node_runtime.metrics, node_runtime.outcomes, node_runtime.keys, node_runtime.settings;"
        "print([m for m in ('torch', 'vllm', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "[]\n"
