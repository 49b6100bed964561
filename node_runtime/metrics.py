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

from node_runtime import addresses
from node_runtime.credentials import metrics_context
from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.logs import get_logger
from node_runtime.process_health import ProcessHealth
from node_runtime.runtime_settings import RuntimeSettings

# Seconds. Tools take from a millisecond (a calculator) to minutes (a test suite).
TOOL_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 300.0,
)  # fmt: skip

_MAX_CLIENTS: Final = 64
_CLIENT_S: Final = 10.0  # what one client gets before it may be cut off
_PAUSE_S: Final = 0.05
_REQUEST_BYTES: Final = 32_768  # what is read of one request; http.server alone would hold 6 MB of headers
_FORM: Final = ("HTTP_ACCEPT", "HTTP_ACCEPT_ENCODING", "QUERY_STRING")  # the form of the page that is asked for

log = get_logger("node_runtime.metrics")

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
        server = _Server(*addresses.own(host, wanted, "/metrics"), _App(health), tls)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            sentence = (
                f"/metrics: port {wanted} on {host} is in use: choose another runtime.metrics_port, or 0 for a free one"
            )
        else:
            sentence = f"/metrics: cannot listen on {addresses.join(host, wanted)}: {error.strerror or error}"
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
        self._page = make_wsgi_app(prometheus_client.REGISTRY)
        self._fails = False
        self._one_page = threading.Lock()  # many at once would take turns with the event loop, each its own

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method = environ.get("REQUEST_METHOD")
        if method not in ("GET", "HEAD"):
            return _say(start_response, "405 Method Not Allowed", "only GET and HEAD are answered here")
        body = self._get(environ | {"REQUEST_METHOD": "GET"}, start_response)
        return body if method == "GET" else []

    def _get(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path in ("/", "/metrics"):
            return self._metrics(environ, start_response)
        if path == "/startupz":
            return _judge(start_response, self._health.why_not_started() if self._health else None)
        if path == "/healthz":
            return _judge(start_response, self._health.why_dead() if self._health else None)
        if path == "/readyz":
            return _judge(start_response, self._health.why_not_ready() if self._health else None)
        return _say(start_response, "404 Not Found", "here are /metrics, /startupz, /healthz and /readyz")

    def _metrics(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """The page; in its plain form for who asks for another in words that the library cannot read."""
        head: tuple[str, list[tuple[str, str]]] = ("", [])

        def take_head(status: str, headers: list[tuple[str, str]]) -> None:
            nonlocal head
            head = status, headers

        error: Exception | None = None
        for asked in (environ, {name: value for name, value in environ.items() if name not in _FORM}):
            try:
                with self._one_page:
                    body = b"".join(self._page(asked, take_head))
            except Exception as failed:  # noqa: BLE001 (a collector's, which must not fill the log at each scrape)
                error = failed
                continue
            if asked is environ:
                self._fails = False
            start_response(head[0], [*head[1], ("Content-Length", str(len(body)))])
            return [body]
        if not self._fails:
            self._fails = True
            log.error("the metrics cannot be collected: told once until they can", exc_info=error)
        return _say(start_response, "500 Internal Server Error", f"the metrics cannot be collected: {error}")


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

    def __init__(self, family: socket.AddressFamily, address: Any, app: _App, tls: ssl.SSLContext | None) -> None:
        self.address_family = family
        self._tls = tls
        self._clients: collections.OrderedDict[socket.socket, float] = collections.OrderedDict()  # oldest first
        self._lock = threading.Lock()
        super().__init__(address, _Handler)
        self.set_app(app)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for this machine's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> Any:
        """On the accepting thread."""
        try:
            return super().get_request()
        except OSError:  # out of file descriptors, most likely: asked again at once, it would keep a core busy
            time.sleep(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """On the accepting thread, which must not wait for anybody."""
        with self._lock:
            self._clients[request] = time.monotonic()
        self._cut_off()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """On the accepting thread, every half second and after each client."""
        self._cut_off()

    def _cut_off(self) -> None:
        """Whoever had his time, and of too many the oldest. Their threads notice, and take them off the list."""
        now = time.monotonic()
        with self._lock:
            late = [
                client
                for number, (client, since) in enumerate(self._clients.items())
                if now - since > _CLIENT_S or number < len(self._clients) - _MAX_CLIENTS
            ]
        for client in late:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

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
