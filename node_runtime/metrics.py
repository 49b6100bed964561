"""/metrics, and /startupz, /healthz and /readyz for probes, on a port of their own.

Invariant: answering runs on threads of its own and touches no event loop, so a busy or hanging loop still shows its
metrics; a client costs one of a bounded number of threads for a bounded time, whatever it sends or leaves out.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client.exposition import make_wsgi_app

from node_runtime.credentials import metrics_context
from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.process_health import ProcessHealth
from node_runtime.runtime_settings import RuntimeSettings

# Seconds. Tools take from a millisecond (a calculator) to minutes (a test suite).
TOOL_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 300.0,
)  # fmt: skip

_MAX_CLIENTS: Final = 64
_CLIENT_S: Final = 10.0  # what one client gets before it may be cut off
_REQUEST_BYTES: Final = 32_768  # what is read of one request; http.server alone would hold 6 MB of headers

_servers: dict[int, _Server] = {}


def start_metrics(runtime: RuntimeSettings, health: ProcessHealth | None = None) -> int | None:
    """Serves the default registry and `health`; returns the port bound, None where metrics are off.

    Raises NodeError: EXIT_UNAVAILABLE where the port cannot be had, EXIT_USAGE for unusable TLS files.
    """
    if runtime.metrics_port is None:
        return None
    host, wanted = runtime.metrics_host, runtime.metrics_port
    tls = metrics_context(runtime)
    try:
        server = _Server(host, wanted, _App(health), tls)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            sentence = (
                f"/metrics: port {wanted} on {host} is in use: choose another runtime.metrics_port, or 0 for a free one"
            )
        else:
            sentence = f"/metrics: cannot listen on {host}:{wanted}: {error.strerror or error}"
        raise NodeError(sentence, EXIT_UNAVAILABLE) from None
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    port = int(server.server_port)
    _servers[port] = server
    return port


def stop_metrics(port: int | None) -> None:
    """Stops what start_metrics began; without effect for None."""
    server = _servers.pop(port, None) if port is not None else None
    if server is not None:
        server.shutdown()
        server.server_close()


class _App:
    """The WSGI application."""

    def __init__(self, health: ProcessHealth | None) -> None:
        self._health = health
        self._metrics = make_wsgi_app(prometheus_client.REGISTRY)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _say(start_response, "405 Method Not Allowed", "only GET and HEAD are answered here")
        if path in ("/", "/metrics"):
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        if path == "/startupz":
            return _judge(start_response, self._health.why_not_started() if self._health else None)
        if path == "/healthz":
            return _judge(start_response, self._health.why_dead() if self._health else None)
        if path == "/readyz":
            return _judge(start_response, self._health.why_not_ready() if self._health else None)
        return _say(start_response, "404 Not Found", "here are /metrics, /startupz, /healthz and /readyz")


def _judge(start_response: Any, why_not: str | None) -> Iterable[bytes]:
    if why_not is None:
        return _say(start_response, "200 OK", "ok")
    return _say(start_response, "503 Service Unavailable", why_not)


def _say(start_response: Any, status: str, text: str) -> Iterable[bytes]:
    body = (text + "\n").encode()
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
    return [body]


class _FirstBytes(io.BufferedIOBase):
    """The beginning of what a client sends; after that it is as if it had sent no more."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._left = _REQUEST_BYTES

    def readline(self, size: int | None = -1) -> bytes:
        line: bytes = self._file.readline(self._left if size is None or size < 0 else min(size, self._left))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()
        super().close()


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def setup(self) -> None:
        super().setup()
        self.rfile = _FirstBytes(self.rfile)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""

    def address_string(self) -> str:
        return str(self.client_address[0])  # no look-up of names


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: _App, tls: ssl.SSLContext | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tls = tls
        self._clients: collections.OrderedDict[socket.socket, float] = collections.OrderedDict()  # oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for this machine's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """On the accepting thread, which must not wait for anybody."""
        now = time.monotonic()
        with self._lock:
            self._clients[request] = now
            late = [
                client
                for number, (client, since) in enumerate(self._clients.items())
                if now - since > _CLIENT_S or number < len(self._clients) - _MAX_CLIENTS
            ]
        for client in late:  # their threads notice, and take them off the list
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """On the client's own thread, where a handshake may take its time."""
        request.settimeout(_CLIENT_S)
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        with self._tls.wrap_socket(request.dup(), server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, spoke no TLS or no HTTP: its own affair."""
