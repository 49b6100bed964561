"""Why no TLS connection comes about: asked of the peer itself, as gRPC says "Socket closed" whatever the reason.

Invariant: a sentence is given only where the peer is there and says so; who is down, slow or restarting is not judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any, Final

from node_runtime.addresses import is_unix, split
from node_runtime.runtime_settings import RuntimeSettings, TlsSettings

_ASK_S: Final = 1.0
_AGAIN_S: Final = 0.1
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # RFC 9113, 3.4
_SETTINGS: Final = b"\x04"  # the type of the frame that answers it


async def refusal(
    address: str, runtime: RuntimeSettings, server_name: str | None = None, *, within_s: float = _ASK_S
) -> str | None:
    """What would be right, where TLS is what keeps us from `address`; else None.

    `server_name`: as of `open_channel`.
    """
    if is_unix(address):
        return None
    host, port = split(address)
    tls = runtime.tls
    try:
        async with asyncio.timeout(within_s):
            if tls.enabled:
                return await _ask_encrypted(address, host, port, tls, tls.server_name or server_name or host)
            return await _ask_plain(address, host, port)
    except OSError:  # nobody is there, or it went away, or it takes its time
        return None


async def _ask_plain(address: str, host: str, port: int) -> str | None:
    """A server that speaks TLS does not answer HTTP/2's greeting, but shakes hands."""
    with contextlib.suppress(ConnectionError):
        async with _connection(host, port) as (reader, writer):
            writer.write(_GREETING)
            if (await reader.read(9))[3:4] == _SETTINGS:
                return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with _connection(host, port, ssl=context):
            pass
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return None
    return f"{address} speaks TLS and this process does not: name its authority in runtime.tls.ca_file"


async def _ask_encrypted(address: str, host: str, port: int, tls: TlsSettings, name: str) -> str | None:
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.set_alpn_protocols(["h2"])
    if tls.cert_file is not None:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    try:
        # In TLS 1.3 a server judges our certificate after the handshake, and gRPC's then hangs up without a word. So
        # does one that is just ending: it is asked again.
        for _ in range(2):
            async with _connection(host, port, ssl=context, server_hostname=name) as (reader, _writer):
                if await reader.read(1):
                    return None
            await asyncio.sleep(_AGAIN_S)
        return _unaccepted(address, tls)
    except ssl.SSLCertVerificationError as error:
        return _untrusted(address, tls, name, error)
    except ssl.SSLError as error:
        return _alert(address, tls, error.reason or "")


@contextlib.asynccontextmanager
async def _connection(
    host: str, port: int, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port, **options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def _untrusted(address: str, tls: TlsSettings, name: str, error: ssl.SSLCertVerificationError) -> str:
    why = error.verify_message.rstrip(".")
    if "mismatch" in why.lower():
        return (
            f"the certificate of {address} is not for {name}: connect to a name that stands in it, or say which one in "
            "runtime.tls.server_name"
        )
    authority = f"runtime.tls.ca_file ({tls.ca_file})" if tls.ca_file else "the system's authorities"
    return f"the certificate of {address} is not trusted by {authority} ({why}): name the authority that signed it"


def _alert(address: str, tls: TlsSettings, reason: str) -> str | None:
    if "WRONG_VERSION_NUMBER" in reason or "UNSUPPORTED_PROTOCOL" in reason or "HTTP_REQUEST" in reason:
        return f"{address} speaks no TLS and this process does: set TLS up there, or take runtime.tls away here"
    return _unaccepted(address, tls) if "ALERT" in reason else None


def _unaccepted(address: str, tls: TlsSettings) -> str:
    if tls.cert_file is None:
        return f"{address} asks for a client certificate: name runtime.tls.cert_file and key_file"
    return (
        f"{address} does not accept the certificate in runtime.tls.cert_file ({tls.cert_file}): "
        "show one that its runtime.tls.ca_file has signed"
    )
