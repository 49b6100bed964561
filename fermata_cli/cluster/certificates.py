"""A throw-away certificate authority: server and client certificates for this machine's loopback.

Invariant: a private key is readable by its owner alone from its first byte on; the authority's own is never written.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import NameOID

LIFETIME = datetime.timedelta(days=7)
"""For as long as somebody may look at a run that is over; nobody should trust these for longer."""
_EARLIER = datetime.timedelta(minutes=5)  # clocks differ


@dataclass(frozen=True)
class Pem:
    """The files of one certificate chain and its key."""

    cert: Path
    key: Path


class Authority:
    """Issues certificates into a folder, which must exist."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._cert = (
            self._builder(subject, subject, self._key, -_EARLIER, LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = folder / f"{name}.pem"
        self.ca_file.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    @staticmethod
    def _builder(
        subject: x509.Name,
        issuer: x509.Name,
        key: CertificateIssuerPrivateKeyTypes,
        begins: datetime.timedelta,
        ends: datetime.timedelta,
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
        )

    def issue(
        self,
        name: str,
        *,
        hosts: tuple[str, ...] = ("localhost",),
        ips: tuple[str, ...] = ("127.0.0.1", "::1"),
        begins: datetime.timedelta = -_EARLIER,
        ends: datetime.timedelta = LIFETIME,
        key: CertificateIssuerPrivateKeyTypes | None = None,
    ) -> Pem:
        """A certificate for servers and clients of these names and addresses. `begins` and `ends`: from now."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts]
        names += [x509.IPAddress(ipaddress.ip_address(ip)) for ip in ips]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert = (
            self._builder(subject, self._cert.subject, key, begins, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = Pem(self._folder / f"{self._name}-{name}.pem", self._folder / f"{self._name}-{name}.key")
        pem.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        write_secret(
            pem.key,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
        return pem


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def write_secret(path: Path, data: bytes) -> None:
    """A new file that only its owner may read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
