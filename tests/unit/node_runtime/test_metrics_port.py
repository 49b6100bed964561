"""The metrics port: probes beside /metrics, clients that misbehave, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from fermata_cli.cluster.certificates import Authority
from node_runtime import metrics
from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.metrics import start_metrics, stop_metrics
from node_runtime.process_health import ProcessHealth
from node_runtime.runtime_settings import RuntimeSettings, TlsSettings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def serving(runtime: RuntimeSettings, health: ProcessHealth | None = None) -> Iterator[int]:
    port = start_metrics(runtime, health)
    assert port is not None
    try:
        yield port
    finally:
        stop_metrics(port)


def ask(port: int, path: str, method: str = "GET", context: ssl.SSLContext | None = None) -> tuple[int, str]:
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        if context is None
        else http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    )
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode().strip()


PLAIN = RuntimeSettings(metrics_port=0)


def test_probes_follow_the_life_of_a_process() -> None:
    clock = Clock()
    health = ProcessHealth(30.0, clock)
    with serving(PLAIN, health) as port:
        assert ask(port, "/healthz") == (200, "ok")
        assert ask(port, "/readyz") == (503, "the process is starting")
        assert ask(port, "/startupz") == (503, "the process is starting")
        health.waiting("waiting for a tool gateway at 127.0.0.1:7000")
        waits = "the process is starting: waiting for a tool gateway at 127.0.0.1:7000"
        assert ask(port, "/readyz") == ask(port, "/startupz") == (503, waits)
        loop = asyncio.new_event_loop()
        health.beat_on(loop)
        clock.now += 1000  # an import or a model that loads on the loop
        assert ask(port, "/healthz") == (200, "ok")
        health.beat_on(loop)
        health.ready()
        assert ask(port, "/readyz") == (200, "ok")
        health.serving("its weights failed the proof")
        assert ask(port, "/readyz") == (503, "its weights failed the proof")
        assert ask(port, "/startupz") == (200, "ok")
        assert ask(port, "/healthz") == (200, "ok")
        health.serving(None)
        assert ask(port, "/readyz") == (200, "ok")
        clock.now += 31
        hangs = "the event loop has not turned for 31 s, more than runtime.liveness_s (30)"
        assert ask(port, "/healthz") == (503, hangs)
        assert ask(port, "/readyz") == (503, hangs)
        health.beat_on(loop)
        assert ask(port, "/healthz") == (200, "ok")
        health.stopping()
        assert ask(port, "/readyz") == (503, "the process is stopping")
        assert ask(port, "/healthz") == (200, "ok")
        loop.close()


async def test_a_loop_that_hangs_is_seen_to_hang_and_to_go_on() -> None:
    health = ProcessHealth(0.2)
    health.beat_on(asyncio.get_running_loop())
    health.ready()
    seen: list[tuple[int, str]] = []
    with serving(PLAIN, health) as port:

        def look() -> None:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not (seen and seen[-1][0] == 503):
                seen.append(ask(port, "/healthz"))

        watcher = threading.Thread(target=look)
        watcher.start()
        while watcher.is_alive():  # the loop stands still
            watcher.join(0.1)
        assert seen[-1][0] == 503
        deadline = time.monotonic() + 10
        while (await asyncio.to_thread(ask, port, "/healthz"))[0] != 200:
            assert time.monotonic() < deadline, "the loop goes on and nobody sees it"


def test_other_paths_and_methods_are_told() -> None:
    with serving(PLAIN) as port:
        assert ask(port, "/nothing") == (404, "here are /metrics, /startupz, /healthz and /readyz")
        assert ask(port, "/metrics", "POST") == (405, "only GET and HEAD are answered here")
        assert "# TYPE" in ask(port, "/metrics")[1]


def test_clients_that_say_nothing_keep_nobody_waiting() -> None:
    before = threading.active_count()
    with serving(PLAIN) as port, contextlib.ExitStack() as silent:
        for _ in range(3 * metrics._MAX_CLIENTS):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        assert ask(port, "/healthz") == (200, "ok")
        deadline = time.monotonic() + 10
        while threading.active_count() > before + metrics._MAX_CLIENTS + 2:
            assert time.monotonic() < deadline, "threads pile up"
            time.sleep(0.02)


def test_endless_headers_are_not_held() -> None:
    head = b"GET /healthz HTTP/1.1\r\n" + b"".join(b"X-%d: " % i + b"a" * 60_000 + b"\r\n" for i in range(99))
    tracemalloc.start()
    try:
        with serving(PLAIN) as port, contextlib.ExitStack() as open_clients:
            for _ in range(8):
                client = open_clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                with contextlib.suppress(OSError):  # it is answered, and cut off, before it has sent all
                    client.sendall(head)
            assert ask(port, "/healthz") == (200, "ok")
            assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "words",
    [b"\x00\xff\x16\x03\x01garbage\r\n\r\n", b"GET /metrics\r\n\r\n", b"GET " + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n"],
    ids=["binary", "no version", "endless path"],
)
def test_garbage_ends_its_own_connection_only(words: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(PLAIN) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client, contextlib.suppress(OSError):
            client.sendall(words)
            while client.recv(65536):
                pass
        assert ask(port, "/healthz") == (200, "ok")
    assert "Traceback" not in capfd.readouterr().err


def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pem = authority.issue("gateway")
    tls = TlsSettings(cert_file=pem.cert, key_file=pem.key, ca_file=authority.ca_file, require_client_cert=True)
    trusting = ssl.create_default_context(cafile=str(authority.ca_file))
    with serving(RuntimeSettings(metrics_port=0, metrics_tls=True, tls=tls)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10):  # somebody who never shakes hands
            assert ask(port, "/healthz", context=trusting) == (200, "ok")
            assert "# TYPE" in ask(port, "/metrics", context=trusting)[1]
        with pytest.raises(OSError, match=r".*"):
            ask(port, "/healthz")
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(port, "/healthz", context=ssl.create_default_context())
    with serving(RuntimeSettings(metrics_port=0, tls=tls)) as port:  # TLS elsewhere says nothing about this port
        assert ask(port, "/healthz") == (200, "ok")


def test_tls_without_a_certificate_or_with_another_ones_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metrics_tls needs a certificate"):
        RuntimeSettings(metrics_port=0, metrics_tls=True)
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    runtime = RuntimeSettings(metrics_port=0, metrics_tls=True, tls=TlsSettings(cert_file=one.cert, key_file=other.key))
    with pytest.raises(NodeError, match="name a certificate and its own key") as caught:
        start_metrics(runtime)
    assert caught.value.exit_code == EXIT_USAGE
