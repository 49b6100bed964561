"""TLS and bearer tokens, read from files.

Invariant: a token never leaves this machine in clear, and never appears in an error, a log line or a settings dump.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path
from typing import Final

import grpc

from node_runtime.addresses import is_loopback, is_unix, split
from node_runtime.errors import EXIT_USAGE, NodeError
from node_runtime.logs import get_logger
from node_runtime.runtime_settings import RuntimeSettings, TlsSettings
from node_runtime.tls_files import Chain, read_authorities, read_chain, read_file

_MAX_TOKEN: Final = 4096  # characters: gRPC ends calls with more metadata than 8 KiB

log = get_logger("node_runtime.credentials")


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials | None:
    """None where TLS is off. Raises NodeError (EXIT_USAGE) where a file cannot be used or no client would trust it."""
    if not tls.enabled:
        return None
    if tls.cert_file is None or tls.key_file is None:
        raise NodeError(
            "runtime.tls: TLS is on (ca_file is set) and this process serves: name its cert_file and key_file too",
            EXIT_USAGE,
        )
    ca = read_authorities(tls.ca_file) if tls.ca_file else None
    shown = _shown(tls.cert_file, tls.key_file)
    return grpc.ssl_server_credentials(
        [(shown.key, shown.cert)],
        root_certificates=ca if tls.require_client_cert else None,
        require_client_auth=tls.require_client_cert,
    )


def _shown(cert_file: Path, key_file: Path) -> Chain:
    """What clients are shown. One that is not valid yet may be so in a moment, where clocks differ."""
    chain = read_chain(cert_file, key_file)
    if chain.why_not_now is not None:
        sentence = f"runtime.tls.cert_file: the certificate in {cert_file} {chain.why_not_now}"
        if chain.expired:
            raise NodeError(f"{sentence}, and no client trusts it: name a renewed one", EXIT_USAGE)
        log.warning(f"{sentence}: until then no client trusts it")
    return chain


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials | None:
    """None where TLS is off. Raises NodeError (EXIT_USAGE) where a file cannot be used."""
    if not tls.enabled:
        return None
    ca = read_authorities(tls.ca_file) if tls.ca_file else None
    if tls.cert_file is None or tls.key_file is None:
        return grpc.ssl_channel_credentials(root_certificates=ca)
    shown = read_chain(tls.cert_file, tls.key_file)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=shown.key, certificate_chain=shown.cert)


def metrics_context(runtime: RuntimeSettings) -> ssl.SSLContext | None:
    """For the metrics port, which asks nobody for a certificate: a kubelet's probe has none. None where it is plain."""
    tls = runtime.tls
    if not runtime.metrics_tls or tls.cert_file is None or tls.key_file is None:
        return None
    _shown(tls.cert_file, tls.key_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    except (ssl.SSLError, OSError) as error:  # replaced a moment ago
        raise NodeError(
            f"runtime.tls: {tls.cert_file} and {tls.key_file} cannot be used ({error.strerror or error}): "
            "name a certificate and its own key",
            EXIT_USAGE,
        ) from None
    return context


def read_tokens(path: Path, setting: str) -> list[str]:
    """The tokens of a file: one a line, empty lines and # comments skipped. At least one, else NodeError."""
    try:
        text = read_file(path, setting).decode()
    except UnicodeDecodeError:
        raise NodeError(f"{setting}: {path} is not UTF-8: write one token a line", EXIT_USAGE) from None
    tokens = [line for raw in text.split("\n") if (line := raw.strip()) and not line.startswith("#")]
    for number, token in enumerate(tokens, start=1):
        if not token.isascii():
            why = "characters outside ASCII in it"
        elif not token.isprintable() or " " in token:
            why = "blanks or control characters in it"
        elif len(token) > _MAX_TOKEN:
            why = f"more than {_MAX_TOKEN} characters"
        else:
            continue
        raise NodeError(f"{setting}: token {number} in {path} has {why}: a token is printable ASCII", EXIT_USAGE)
    if not tokens:
        raise NodeError(f"{setting}: {path} holds no token: write one a line", EXIT_USAGE)
    return tokens


class TokenCheck:
    """Decides whether an `authorization` value is one of the accepted bearer tokens, in time that does not depend on
    which token was nearly right."""

    def __init__(self, tokens: list[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def refusal(self, authorization: str | bytes | None) -> str | None:
        """None where the caller may go on; else the sentence for it (never holding what it sent)."""
        if authorization is None:
            return "no token was sent: send 'authorization: Bearer TOKEN' (runtime.tokens.send_file)"
        text = authorization if isinstance(authorization, str) else authorization.decode("latin-1")
        scheme, _, token = text.partition(" ")
        if scheme.lower() != "bearer":
            return "the authorization sent is no bearer token: send 'authorization: Bearer TOKEN'"
        shown = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(shown, digest)
        return (
            None
            if known
            else "the token sent is not accepted here: send one of the server's runtime.tokens.accept_file"
        )


def auth_metadata(runtime: RuntimeSettings) -> tuple[tuple[str, str], ...]:
    """The metadata that shows our token; empty where none is set. open_channel adds it by itself."""
    if runtime.tokens.send_file is None:
        return ()
    token = read_tokens(runtime.tokens.send_file, "runtime.tokens.send_file")[0]
    return (("authorization", f"Bearer {token}"),)


def check_token_stays_here(address: str, runtime: RuntimeSettings) -> None:
    """Raises NodeError (EXIT_USAGE) where our token would travel in clear to another machine."""
    if runtime.tokens.send_file is None or runtime.tls.enabled or is_unix(address):
        return
    host, _port = split(address)
    if not is_loopback(host):
        raise NodeError(
            f"{address}: a token is set (runtime.tokens.send_file) and would travel in clear: set runtime.tls.ca_file, "
            "or connect to a loopback address",
            EXIT_USAGE,
        )
