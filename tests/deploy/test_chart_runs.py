"""The processes really run as the chart starts them: its commands, its settings files, its probes, on loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fermata_cli.cluster.certificates import Authority
from tests.deploy.chart import ROOT, Document, container, pod_specs, rendered, settings_text

pytestmark = pytest.mark.integration
HERE = ("runtime.metrics_host=127.0.0.1", "runtime.metrics_port=0")
CONFIG = "/etc/fermata/fermata.yaml"


def as_here(words: Sequence[str], config: Path, overrides: Sequence[str]) -> list[str]:
    """A container's command with this machine's Python and paths; `overrides` stand for what a pod has for itself."""
    assert CONFIG in words
    start = {"python": [sys.executable], "fermata": [sys.executable, "-m", "fermata_cli"]}[words[0]]
    own = [str(config) if word == CONFIG else word for word in words[1:]]
    return [*start, *own, *(word for override in overrides for word in ("--set", override))]


@contextlib.contextmanager
def process(
    documents: Sequence[Document], role: str, folder: Path, overrides: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Started as the role's container is; gives what its ready line says. It must leave orderly."""
    config = folder / f"{role}.yaml"
    config.write_text(settings_text(tuple(documents), role))
    only = container(pod_specs(tuple(documents))[role])
    command = as_here([*only["command"], *only.get("args", ())], config, overrides)
    with (folder / f"{role}.log").open("w+") as log:
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line, Path(log.name).read_text()
            yield json.loads(line)
            child.terminate()
            assert child.wait(timeout=30) == 0, Path(log.name).read_text()
        finally:
            child.kill()
            child.wait()


def probe(documents: Sequence[Document], role: str, port: int) -> list[tuple[str, int]]:
    """What the kubelet is answered; like it, without looking at the certificate."""
    only = container(pod_specs(tuple(documents))[role])
    told = []
    for kind in ("startup", "liveness", "readiness"):
        asked = only[f"{kind}Probe"]["httpGet"]
        connection = (
            http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=ssl._create_unverified_context())
            if asked["scheme"] == "HTTPS"
            else http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        )
        with contextlib.closing(connection):
            connection.request("GET", asked["path"])
            told.append((kind, connection.getresponse().status))
    return told


def fermata(words: Sequence[str], config: Path, overrides: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = as_here(["fermata", *words, "--config", CONFIG], config, overrides)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, env={**os.environ})


@pytest.mark.parametrize("name", ["cpu", "tls"])
def test_a_tool_is_called_through_gateway_and_backend(name: str, tmp_path: Path) -> None:
    documents = rendered(name)
    here = [*HERE]
    if name == "tls":
        # As a secret would hold them: one certificate, for the one name that the chart's values say they carry.
        authority = Authority(tmp_path)
        pem = authority.issue("pod", hosts=("fermata.internal",), ips=())
        token = tmp_path / "tokens"
        token.write_text("correct-horse\n")
        here += [f"runtime.tls.ca_file={authority.ca_file}", f"runtime.tls.cert_file={pem.cert}"]
        here += [f"runtime.tls.key_file={pem.key}"]
        here += [f"runtime.tokens.accept_file={token}", f"runtime.tokens.send_file={token}"]
    backend_here = [*here, "backend.host=127.0.0.1", "backend.port=0"]
    with process(documents, "tool-calculator", tmp_path, backend_here) as backend:
        pools = json.dumps([{"name": "calculator", "dns": f"localhost:{backend['port']}"}])
        gateway_here = [*here, "gateway.host=127.0.0.1", "gateway.port=0", f"gateway.pools={pools}"]
        with process(documents, "gateway", tmp_path, gateway_here) as gateway:
            for role, ready in (("tool-calculator", backend), ("gateway", gateway)):
                assert probe(documents, role, ready["metrics_port"]) == [
                    ("startup", 200),
                    ("liveness", 200),
                    ("readiness", 200),
                ]
            config = tmp_path / "gateway.yaml"
            address = ["--gateway", f"127.0.0.1:{gateway['port']}"]
            called = fermata(["tools", "call", "calculator", '{"expression": "6*7"}', *address], config, here)
            assert (called.returncode, called.stdout) == (0, "42\n"), called.stderr
            # What `helm test` runs.
            only = container(pod_specs(documents)["test"])
            words = [*only["command"][1:-2], *only["args"]]
            assert only["command"][-2:] == ["--config", CONFIG]
            words[-1] = address[-1]
            listed = fermata(words, config, here)
            assert listed.returncode == 0, listed.stderr
            assert "calculator" in listed.stdout
            if name == "tls":
                token.write_text("wrong\n")
                refused = fermata(["tools", "list", *address], config, here)
                assert refused.returncode == 3
                assert "the token sent is not accepted here" in refused.stderr
