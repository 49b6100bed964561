"""The one way to a peer: TLS, token and options in one place.

Invariant: a channel is one connection of its own to one address, never retries by itself, and a peer that is not there
is one sentence after a bounded wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from node_runtime.addresses import is_unix, split
from node_runtime.credentials import auth_metadata, channel_credentials, check_token_stays_here
from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.grpc_options import CHANNEL_OPTIONS, KEEPALIVE_OPTIONS
from node_runtime.handshake import expected_name, refusal
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.token_channel import TokenChannel

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"


def error_sentence(error: grpc.aio.AioRpcError) -> str:
    """The status of a failed RPC: its code and what the peer, or gRPC itself, said of it."""
    return f"{error.code().name}: {error.details() or 'no detail'}"


_CUT_OFF: Final = ("handshake", "verification", "socket closed", "reset by peer", "failed parsing http/2")


async def told_error(
    error: grpc.aio.AioRpcError, address: str, runtime: RuntimeSettings, server_name: str | None = None
) -> tuple[str, bool]:
    """The sentence of an RPC's end, and whether the peer refuses us: it is there, and trying again will not help.

    Where TLS may be why a connection was cut off, the peer is asked, for a second at most.
    """
    details = (error.details() or "").lower()
    if error.code() == grpc.StatusCode.UNAVAILABLE and any(word in details for word in _CUT_OFF):
        refused = await refusal(address, runtime, server_name)
        if refused is not None:
            return refused, True
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        return f"{address} refuses this process: {error.details()}", True
    return error_sentence(error), False


def open_channel(
    address: str, runtime: RuntimeSettings, *, keepalive: bool = True, server_name: str | None = None
) -> grpc.aio.Channel:
    """A channel to `address` ("host:port", "[v6]:port" or "unix:path"); call inside a running loop, close it yourself.

    `keepalive=False` for peers that may run another gRPC server with default ping policy (a tool backend in another
    language): such a server ends connections that are pinged more than once in five minutes. `server_name`: the name
    that the address was looked up by, which its certificate is then expected to carry (runtime.tls.server_name, where
    it is set, says otherwise).
    Raises NodeError (EXIT_USAGE) for a malformed address, unreadable files, or a token that would travel in clear.
    """
    if not is_unix(address):
        split(address)
    check_token_stays_here(address, runtime)
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS, *(KEEPALIVE_OPTIONS if keepalive else ())]
    credentials = channel_credentials(runtime.tls)
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        expected = expected_name(address, runtime.tls, server_name)
        if is_unix(address) or expected != split(address)[0]:
            options.append(("grpc.ssl_target_name_override", expected))
        channel = grpc.aio.secure_channel(address, credentials, options)
    pairs = auth_metadata(runtime)
    return TokenChannel(channel, pairs) if pairs else channel


async def wait_ready(
    channel: grpc.aio.Channel,
    address: str,
    runtime: RuntimeSettings,
    *,
    timeout_s: float,
    what: str,
    server_name: str | None = None,
    on_wait: Callable[[str], None] | None = None,
    every_s: float = 5.0,
) -> None:
    """Returns once the peer answers a health check in any way (its loop is alive, not just its socket).

    While it does not, `on_wait` is given a sentence after the first second and then every `every_s`. Raises NodeError
    (EXIT_UNAVAILABLE) after `timeout_s` with the last reason, and at once where TLS keeps us out or no gRPC is spoken.
    """
    check = channel.unary_unary(
        _HEALTH_CHECK,
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    begun = time.monotonic()
    slice_s = min(1.0, every_s)
    reason = ""
    while True:
        left = timeout_s - (time.monotonic() - begun)
        if left <= 0:
            reason = await _last_reason(check) or reason
            because = f" ({reason})" if reason else ""
            raise NodeError(
                f"{what} at {address} did not answer within {timeout_s:g} s{because}: start it, or correct its address",
                EXIT_UNAVAILABLE,
            )
        tried = time.monotonic()
        try:
            await check(health_pb2.HealthCheckRequest(), timeout=min(left, slice_s), wait_for_ready=True)
            return
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                return  # NOT_FOUND, UNIMPLEMENTED, UNAUTHENTICATED: somebody is there
            reason = _one_line(error.details())
        within_s = max(0.1, min(1.0, begun + timeout_s - time.monotonic()))
        refused = await refusal(address, runtime, server_name, within_s=within_s)
        if refused is not None:
            raise NodeError(f"{what}: {refused}", EXIT_UNAVAILABLE)
        if on_wait is not None:
            on_wait(f"waiting for {what} at {address} ({time.monotonic() - begun:.0f} of {timeout_s:g} s)")
            slice_s = every_s
        # UNAVAILABLE comes at once where a connection was cut in the middle: wait out a little of the slice.
        if time.monotonic() - tried < 0.1:
            await asyncio.sleep(min(0.2, max(0.0, timeout_s - (time.monotonic() - begun))))


async def _last_reason(check: Callable[..., Any]) -> str:
    """Why it is not there (refused, TLS), which only a call that does not wait for the connection is told."""
    try:
        await check(health_pb2.HealthCheckRequest(), timeout=0.5)
    except grpc.aio.AioRpcError as error:
        return _one_line(error.details()) if error.code() == grpc.StatusCode.UNAVAILABLE else ""
    return ""


def _one_line(text: str | None) -> str:
    flat = " ".join((text or "").split())
    return flat if len(flat) <= 200 else flat[:197] + "..."
