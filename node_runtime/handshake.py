"""Why no connection comes about: asked of the peer itself, as gRPC says "Socket closed" whatever the reason.

Invariant: a sentence is given only where the peer is there and says so; who is down, slow or restarting is not judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any, Final

from node_runtime.addresses import is_unix, split, unix_path
from node_runtime.errors import NodeError
from node_runtime.runtime_settings import RuntimeSettings, TlsSettings
from node_runtime.tls_files import read_chain, trust

_ASK_S: Final = 1.0
_AGAIN_S: Final = 0.1
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # RFC 9113, 3.4
_SETTINGS: Final = b"\x04"  # the type of the frame that answers it
# OpenSSL's X509_V_ERR_…, of which the ssl module gives the numbers alone.
_NOT_YET, _EXPIRED = 9, 10
_UNKNOWN_ISSUER: Final = (2, 18, 19, 20, 21, 27)
_MISMATCH: Final = (62, 64)


async def refusal(
    address: str, runtime: RuntimeSettings, server_name: str | None = None, *, within_s: float = _ASK_S
) -> str | None:
    """What would be right, where TLS or another protocol is what keeps us from `address`; else None.

    `server_name`: as of `open_channel`.
    """
    tls = runtime.tls
    try:
        async with asyncio.timeout(within_s):
            if tls.enabled:
                return await _ask_encrypted(address, tls, expected_name(address, tls, server_name))
            return await _ask_plain(address)
    except (OSError, NodeError):  # nobody is there, or it went away, or it takes its time; or a file was just replaced
        return None


def expected_name(address: str, tls: TlsSettings, server_name: str | None = None) -> str:
    """The name that the certificate of `address` is to be for."""
    return tls.server_name or server_name or ("localhost" if is_unix(address) else split(address)[0])


async def _ask_plain(address: str) -> str | None:
    """A server that speaks TLS does not answer HTTP/2's greeting, but shakes hands."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        async with _connection(address) as (reader, writer):
            writer.write(_GREETING)
            answer = await reader.readexactly(9)
            if answer.startswith((b"HTTP/1", b"<")):
                return f"{address} speaks HTTP/1 and no gRPC: correct the address, which may be that of a metrics port"
            if answer[3:4] == _SETTINGS:
                return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with _connection(address, ssl=context, server_hostname="localhost"):
            pass
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return None
    return f"{address} speaks TLS and this process does not: name its authority in runtime.tls.ca_file"


async def _ask_encrypted(address: str, tls: TlsSettings, name: str) -> str | None:
    context = trust(tls.ca_file)
    context.set_alpn_protocols(["h2"])
    if tls.cert_file is not None and tls.key_file is not None:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    try:
        # In TLS 1.3 a server judges our certificate after the handshake, and gRPC's then hangs up without a word. So
        # does one that is just ending: it is asked again.
        for _ in range(2):
            async with _connection(address, ssl=context, server_hostname=name) as (reader, writer):
                if writer.get_extra_info("ssl_object").selected_alpn_protocol() is None:
                    return _no_http2(address)
                if await reader.read(1):
                    return None
            await asyncio.sleep(_AGAIN_S)
        return _unaccepted(address, tls)
    except ssl.SSLCertVerificationError as error:
        return _untrusted(address, tls, name, error)
    except ssl.SSLError as error:
        return _alert(address, tls, error.reason or "")


@contextlib.asynccontextmanager
async def _connection(address: str, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if is_unix(address):
        reader, writer = await asyncio.open_unix_connection(unix_path(address), **options)
    else:
        reader, writer = await asyncio.open_connection(*split(address), **options)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def _untrusted(address: str, tls: TlsSettings, name: str, error: ssl.SSLCertVerificationError) -> str:
    why = error.verify_message.rstrip(".")
    if error.verify_code in _MISMATCH:
        return (
            f"the certificate of {address} is not for {name}: connect to a name that stands in it, or say which one in "
            "runtime.tls.server_name"
        )
    if error.verify_code == _EXPIRED:
        return f"the certificate of {address}, or its authority's, has expired: renew it, and start that process again"
    if error.verify_code == _NOT_YET:
        return f"the certificate of {address}, or its authority's, is not valid yet: set the clocks of both machines"
    if error.verify_code in _UNKNOWN_ISSUER:
        authority = f"runtime.tls.ca_file ({tls.ca_file})" if tls.ca_file else "the system's authorities"
        return f"the certificate of {address} is not trusted by {authority} ({why}): name the authority that signed it"
    return f"the certificate of {address} is not accepted ({why}): give that process one made for servers"


def _alert(address: str, tls: TlsSettings, reason: str) -> str | None:
    if any(word in reason for word in ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "HTTP_REQUEST")):
        return f"{address} speaks no TLS and this process does: set TLS up there, or take runtime.tls away here"
    if "NO_APPLICATION_PROTOCOL" in reason:
        return _no_http2(address)
    return _unaccepted(address, tls) if "ALERT" in reason else None


def _no_http2(address: str) -> str:
    return f"{address} speaks TLS and no HTTP/2, which gRPC needs: correct the address"


def _unaccepted(address: str, tls: TlsSettings) -> str:
    if tls.cert_file is None or tls.key_file is None:
        return f"{address} asks for a client certificate: name runtime.tls.cert_file and key_file"
    said = f"{address} does not accept the certificate in runtime.tls.cert_file ({tls.cert_file})"
    why_not_now = read_chain(tls.cert_file, tls.key_file).why_not_now
    if why_not_now is not None:
        return f"{said}, which {why_not_now}: name one that is valid now"
    return f"{said}: show one that its runtime.tls.ca_file has signed"
