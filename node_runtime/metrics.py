"""/metrics on a port of its own.

Invariant: scraping runs on its own thread and touches no event loop, so a busy or hanging loop still shows its metrics.
"""

from __future__ import annotations

import errno
from typing import Final
from wsgiref.simple_server import WSGIServer

import prometheus_client

from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.runtime_settings import RuntimeSettings

# Seconds. Tools take from a millisecond (a calculator) to minutes (a test suite).
TOOL_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 300.0,
)  # fmt: skip

_servers: dict[int, WSGIServer] = {}


def start_metrics(runtime: RuntimeSettings) -> int | None:
    """Serves the default registry; returns the port bound, None where metrics are off.

    Raises NodeError (EXIT_UNAVAILABLE) where the port cannot be had.
    """
    if runtime.metrics_port is None:
        return None
    host, wanted = runtime.metrics_host, runtime.metrics_port
    try:
        server, _thread = prometheus_client.start_http_server(wanted, addr=host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            sentence = (
                f"/metrics: port {wanted} on {host} is in use: choose another runtime.metrics_port, or 0 for a free one"
            )
        else:
            sentence = f"/metrics: cannot listen on {host}:{wanted}: {error.strerror or error}"
        raise NodeError(sentence, EXIT_UNAVAILABLE) from None
    port = int(server.server_port)
    _servers[port] = server
    return port


def stop_metrics(port: int | None) -> None:
    """Stops what start_metrics began; without effect for None."""
    server = _servers.pop(port, None) if port is not None else None
    if server is not None:
        server.shutdown()
        server.server_close()
