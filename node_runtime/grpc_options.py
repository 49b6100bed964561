"""The gRPC options of every channel and server, by name.

Invariant: each name exists in the installed gRPC library; gRPC ignores names it does not know without a word, so a test
looks each one up in the library's own strings. Durations are milliseconds, sizes bytes.
"""

from __future__ import annotations

from typing import Final

Options = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

_COMMON: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # With the probe on, flow-control windows grow until a Pong waits seconds behind queued results.
    ("grpc.http2.bdp_probe", 0),
    # How long a frozen peer goes unnoticed is ping_timeout_ms; keepalive_timeout_ms alone does not bound it.
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)

SERVER_OPTIONS: Final[Options] = (
    *_COMMON,
    # Without this two processes share one port silently.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every 30 s; with the default (5 min) their idle streams die of "Too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Who connects and says nothing holds a file descriptor for so long (by default for two minutes).
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Bursts beyond the defaults are ended as bare CANCELLED.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
)

CHANNEL_OPTIONS: Final[Options] = (
    *_COMMON,
    # One retry layer, and it is ours.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A channel is one connection of its own: control beside data, and one peer's death seen by its own channel.
    ("grpc.use_local_subchannel_pool", 1),
    # Peers are named by address; a proxy in the environment is for the web.
    ("grpc.enable_http_proxy", 0),
)

# For peers that are our own servers. A peer with gRPC's default policy (5 min between pings) ends the connection with
# "Too many pings" when it is pinged this often.
KEEPALIVE_OPTIONS: Final[Options] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
