"""The metrics port: probes beside /metrics, clients that misbehave, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client import Metric
from prometheus_client.registry import Collector

from fermata_cli.cluster.certificates import Authority
from node_runtime import metrics
from node_runtime.errors import EXIT_UNAVAILABLE, EXIT_USAGE, NodeError
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


def test_the_lag_of_the_loop_is_the_worst_of_a_while() -> None:
    clock, loop = Clock(), asyncio.new_event_loop()
    health = ProcessHealth(30.0, clock)
    assert health.lag_s() == 0
    for late in (0.0, 0.25, 0.0):
        health.beat_on(loop)
        clock.now += 0.5 + late
    assert health.lag_s() == 0.25
    clock.now += 2  # it has not come round yet
    assert health.lag_s() == 2
    health.beat_on(loop)
    assert health.lag_s() == 2
    for _ in range(30):
        clock.now += 0.5
        health.beat_on(loop)
    assert health.lag_s() == 0
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


def raw(port: int, words: bytes) -> bytes:
    """All that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(words)
        answer = b""
        while data := client.recv(65536):
            answer += data
        return answer


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::1", "::"])
def test_it_listens_where_it_is_told(host: str) -> None:
    with serving(RuntimeSettings(metrics_port=0, metrics_host=host)) as port:
        there = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        with socket.create_connection((there, port), timeout=10) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert client.recv(15) == b"HTTP/1.0 200 OK"
        with pytest.raises(NodeError, match=f"/metrics: port {port} on {host} is in use: choose another") as caught:
            start_metrics(RuntimeSettings(metrics_port=port, metrics_host=host))
        assert caught.value.exit_code == EXIT_UNAVAILABLE


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("a..b", "'a..b' is not an address of this machine"),
        ("a" * 64, "is not an address of this machine"),
        ("nobody.invalid", "'nobody.invalid' is not an address of this machine"),
        ("192.0.2.1", "cannot listen on 192.0.2.1:0: Cannot assign requested address"),
        ("2001:db8::1", r"cannot listen on \[2001:db8::1\]:0: "),
    ],
    ids=range(5),
)
def test_a_host_that_is_not_this_machine_is_one_sentence(host: str, words: str) -> None:
    with pytest.raises(NodeError, match=words) as caught:
        start_metrics(RuntimeSettings(metrics_port=0, metrics_host=host))
    assert caught.value.exit_code == EXIT_UNAVAILABLE


@pytest.mark.parametrize("path", ["/metrics", "/", "/healthz", "/nothing"])
def test_head_is_the_head_of_get(path: str) -> None:
    with serving(PLAIN) as port:
        got, headed = (raw(port, f"{word} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) for word in ("GET", "HEAD"))
    head, _, body = got.partition(b"\r\n\r\n")
    assert headed.partition(b"\r\n\r\n")[2] == b""
    assert f"Content-Length: {len(body)}".encode() in head
    lines, others = (
        {line for line in page.split(b"\r\n") if not line.startswith((b"Date", b"Content-Length"))}
        for page in (head, headed.partition(b"\r\n\r\n")[0])
    )
    assert lines == others


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        (
            b"application/openmetrics-text; version=1.0.0; escaping=allow-utf-8;q=0.6,text/plain;q=0.3",
            b"openmetrics-text",
        ),
        (b"text/plain;version=0.0.4", b"text/plain"),
        (b"application/openmetrics-text; version=abc", b"text/plain"),
        (b"text/plain; version=1.0.0; escaping=nonsense", b"text/plain"),
        (b";;==,,\xff", b"text/plain"),
    ],
    ids=range(5),
)
def test_any_form_that_is_asked_for_gets_the_page(asked: bytes, form: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(PLAIN) as port:
        head, _, page = raw(port, b"GET /metrics HTTP/1.1\r\nAccept: " + asked + b"\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert form in head
    assert b"# TYPE python_info gauge" in page
    assert capfd.readouterr().err == ""


def test_a_collector_that_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Collector):
        broken = True

        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> list[Metric]:
            if self.broken:
                raise RuntimeError("no such table")
            return []

    caplog.set_level("ERROR")
    collector = Failing()
    prometheus_client.REGISTRY.register(collector)
    try:
        with serving(PLAIN) as port:
            for _ in range(3):
                assert ask(port, "/metrics") == (500, "the metrics cannot be collected: no such table")
            assert ask(port, "/healthz") == (200, "ok")
            assert caplog.text.count("the metrics cannot be collected") == 1
            collector.broken = False
            assert ask(port, "/metrics")[0] == 200
            collector.broken = True
            assert ask(port, "/metrics")[0] == 500
            assert caplog.text.count("the metrics cannot be collected") == 2
    finally:
        prometheus_client.REGISTRY.unregister(collector)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_client_that_trickles_is_cut_off_though_nobody_else_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    monkeypatch.setattr(metrics, "_CLIENT_S", 0.5)  # in all; the wait for a byte stays at 10 s
    runtime = PLAIN
    if encrypted:
        pem = Authority(tmp_path).issue("gateway")
        runtime = RuntimeSettings(
            metrics_port=0, metrics_tls=True, tls=TlsSettings(cert_file=pem.cert, key_file=pem.key)
        )
    begun = time.monotonic()
    with serving(runtime) as port, socket.create_connection(("127.0.0.1", port), timeout=0.1) as client:
        for byte in b"\x16" * 100:
            try:
                client.send(bytes([byte]))
                if client.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("it was never cut off")
    assert time.monotonic() - begun < 5


def test_a_request_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_CLIENT_S", 0.5)
    before = threading.active_count()
    with serving(PLAIN) as port, socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        deadline = time.monotonic() + 10
        while threading.active_count() <= before + 1:
            assert time.monotonic() < deadline, "nobody looked after it"
        while threading.active_count() > before + 1:
            assert time.monotonic() < deadline, "its thread stays"
            time.sleep(0.02)


def test_without_file_descriptors_it_waits_and_does_not_spin() -> None:
    """In a process of its own, whose limit can be set."""
    done = subprocess.run(
        [sys.executable, "-c", _OUT_OF_DESCRIPTORS], capture_output=True, text=True, timeout=60, check=True
    )
    share, answer = done.stdout.splitlines()
    assert float(share) < 0.1
    assert answer == "HTTP/1.0 200 OK"


_OUT_OF_DESCRIPTORS = """
import os, resource, socket, time
from node_runtime.metrics import start_metrics
from node_runtime.runtime_settings import RuntimeSettings

port = start_metrics(RuntimeSettings(metrics_port=0))
most = len(os.listdir("/proc/self/fd")) + 4
resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True:
        held.append(open(os.devnull))
except OSError:
    held.pop().close()
client = socket.create_connection(("127.0.0.1", port), timeout=10)
begun, used = time.monotonic(), time.process_time()
time.sleep(1)
print((time.process_time() - used) / (time.monotonic() - begun))
for one in held:
    one.close()
client.sendall(b"GET /healthz HTTP/1.1\\r\\n\\r\\n")
print(client.recv(15).decode())
"""


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
