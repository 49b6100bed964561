"""Addresses: host and port as text, and which of them never leave this machine.

Invariant: an address that is not `host:port` (or `unix:path`) is refused before gRPC sees it, which would wait for it.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
from typing import Any, Final

from node_runtime.errors import EXIT_UNAVAILABLE, EXIT_USAGE, NodeError

_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)


def join(host: str, port: int) -> str:
    """ "127.0.0.1:7010", "[::1]:7010"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises NodeError (EXIT_USAGE)."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise NodeError(f"{address!r} is not an address: write host:port, such as 127.0.0.1:7010", EXIT_USAGE)
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) <= 65535:
        raise NodeError(f"{address!r} has no port between 1 and 65535: write host:port", EXIT_USAGE)
    host = host[1:-1] if bracketed else host
    if not is_host(host) or bracketed != (":" in host):
        raise NodeError(
            f"{address!r} has no host: write a name such as gateway.example (an international one as xn--…), a number "
            "such as 127.0.0.1, or [::1]",
            EXIT_USAGE,
        )
    return host, int(port)


def is_host(host: str) -> bool:
    """Whether it can be a name or a number at all; resolvers and TLS fail on others in ways of their own."""
    if ":" in host:
        try:
            return ipaddress.ip_address(host).version == 6
        except ValueError:
            return False
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split("."))


def reached_at(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def is_unix(address: str) -> bool:
    return address.startswith(("unix:", "unix-abstract:"))


def unix_path(address: str) -> str:
    """The path of "unix:path", "unix:///path" and "unix-abstract:name", as sockets of this machine name it."""
    kind, _, path = address.partition(":")
    if kind == "unix-abstract":
        return "\0" + path
    return path[2:] if path.startswith("///") else path


def is_loopback(host: str) -> bool:
    """True for names and numbers of this machine's loopback; names are not resolved (a resolver may lie)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_free(host: str, port: int, what: str, setting: str) -> None:
    """Raises NodeError (EXIT_UNAVAILABLE) where `host:port` cannot be listened on, saying why.

    gRPC itself says only that it failed. Between this look and the real bind the port may still be taken.
    """
    family, address = own(host, port, what)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise NodeError(_why(error, host, port, what, setting), EXIT_UNAVAILABLE) from None


def own(host: str, port: int, what: str) -> tuple[socket.AddressFamily, Any]:
    """What to listen on for `host`. Raises NodeError (EXIT_UNAVAILABLE) where it names nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it can be no name of a host"
        raise NodeError(f"{what}: {host!r} is not an address of this machine ({why})", EXIT_UNAVAILABLE) from None
    return family, address


def _why(error: OSError, host: str, port: int, what: str, setting: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{what}: port {port} on {host} is in use: stop what listens there or choose another {setting}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{what}: {host} is not an address of this machine: listen on 127.0.0.1, 0.0.0.0 or an own address"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{what}: cannot listen on {join(host, port)}: {reason}"
