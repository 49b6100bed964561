"""The files of TLS, read and judged before gRPC has them, which of what it cannot use says next to nothing.

Invariant: what is handed on can be used: it is PEM, a key is its certificate's own and of a kind that gRPC speaks.
Nothing is written, and no error holds what stands in a file.
"""

from __future__ import annotations

import datetime
import functools
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node_runtime.errors import EXIT_USAGE, NodeError

_MAX_BYTES: Final = 1024 * 1024
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"  # which editors put before UTF-8, and gRPC takes for a part of the first line
_CURVES: Final = ("secp256r1", "secp384r1")


@dataclass(frozen=True, slots=True)
class Chain:
    """What a process shows: PEM, the certificate itself first."""

    cert: bytes
    key: bytes
    begins: datetime.datetime
    ends: datetime.datetime

    @property
    def expired(self) -> bool:
        return datetime.datetime.now(datetime.UTC) > self.ends

    @property
    def why_not_now(self) -> str | None:
        """None where its time is now; else what is wrong with it, as the end of a sentence."""
        now = datetime.datetime.now(datetime.UTC)
        if now > self.ends:
            return f"expired on {self.ends:%Y-%m-%d} at {self.ends:%H:%M} UTC"
        if now < self.begins:
            return f"is not valid before {self.begins:%Y-%m-%d %H:%M} UTC, and here it is {now:%Y-%m-%d %H:%M}"
        return None


def read_file(path: Path, setting: str) -> bytes:
    """What stands in a small file. Raises NodeError (EXIT_USAGE) where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise NodeError(f"{setting}: {path} does not exist: name an existing file", EXIT_USAGE) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NodeError(f"{setting}: {path} cannot be read: {reason}", EXIT_USAGE) from None
    if len(data) > _MAX_BYTES:
        raise NodeError(f"{setting}: {path} has more than the {_MAX_BYTES} bytes that are read", EXIT_USAGE)
    return data.removeprefix(_BYTE_ORDER_MARK)


def read_authorities(path: Path, setting: str = "runtime.tls.ca_file") -> bytes:
    """Certificates of authorities, one or many. Raises NodeError (EXIT_USAGE)."""
    data = _read_pem(path, setting, b"CERTIFICATE")
    if not _are_certificates(data):
        raise NodeError(f"{setting}: {_damaged(path, 'certificate')}", EXIT_USAGE)
    return data


@functools.lru_cache(maxsize=4)  # a system's bundle takes 20 ms, and a pool may open hundreds of channels at once
def _are_certificates(data: bytes) -> bool:
    try:  # what stands between the certificates is nobody's business
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "ignore"))
    except ssl.SSLError:
        return False
    return True


def read_chain(cert_file: Path, key_file: Path) -> Chain:
    """The certificate and its own key. Raises NodeError (EXIT_USAGE)."""
    # Only where TLS is on: it takes a moment.
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = _read_pem(key_file, "runtime.tls.key_file", b"PRIVATE KEY")
    chain = _read_pem(cert_file, "runtime.tls.cert_file", b"CERTIFICATE")
    try:
        own, *_others = x509.load_pem_x509_certificates(chain)
        public = own.public_key()
    except (ValueError, UnsupportedAlgorithm):
        raise NodeError(f"runtime.tls.cert_file: {_damaged(cert_file, 'certificate')}", EXIT_USAGE) from None
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise NodeError(f"runtime.tls.key_file: {_damaged(key_file, 'private key')}", EXIT_USAGE) from None
    if private.public_key() != public:
        raise NodeError(
            f"runtime.tls: the key in {key_file} is not that of the first certificate in {cert_file}: name a "
            "certificate and its own key",
            EXIT_USAGE,
        )
    if not _spoken(private):
        raise NodeError(
            f"runtime.tls.key_file: {key_file} holds a key of a kind that gRPC does not speak: make one for the curve "
            "P-256 or P-384, or an RSA key, and a certificate of it",
            EXIT_USAGE,
        )
    return Chain(chain, key, own.not_valid_before_utc, own.not_valid_after_utc)


def trust(ca_file: Path | None) -> ssl.SSLContext:
    """For asking servers with the standard library, which is to trust whom gRPC trusts."""
    context = ssl.create_default_context(cafile=ca_file)
    # From Python 3.13 on it also asks for extensions that a certificate need not have.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _read_pem(path: Path, setting: str, word: bytes) -> bytes:
    data = read_file(path, setting)
    if b"-----BEGIN " not in data or word not in data:
        raise NodeError(f"{setting}: {path} holds no PEM {word.decode().lower()}: give a PEM file", EXIT_USAGE)
    if word == b"PRIVATE KEY" and b"ENCRYPTED" in data:
        raise NodeError(
            f"{setting}: {path} holds an encrypted key, and a process can ask nobody for its passphrase: give the key "
            "without one, readable by its owner alone",
            EXIT_USAGE,
        )
    return data


def _damaged(path: Path, what: str) -> str:
    return f"{path} holds a {what} that cannot be read: it is damaged or cut off, give the whole file"


def _spoken(key: Any) -> bool:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    return isinstance(key, rsa.RSAPrivateKey) or (
        isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES
    )
