"""Throw-away certificates and a token for one local cluster: `fermata demo --tls`.

Invariant: every process shows a certificate of its own, refuses whoever shows none of this run's, and asks for the
token; the run's settings file names the certificate for people, so that `fermata tools --config` is let in too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fermata_cli.cluster.certificates import Authority, write_secret
from fermata_cli.cluster.plan import Role

_AUTHORITY: Final = "ca"
_PEOPLE: Final = "client"
_TOKEN: Final = "token"
_NAMES: Final = {Role.BACKEND: "backend", Role.GATEWAY: "gateway", Role.ROLLOUT: "rollout", Role.TRAINER: "trainer"}


class ClusterIdentity:
    """The files in a folder, which `write` makes; the settings that name them are known before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    @property
    def settings(self) -> dict[str, str | bool]:
        """Keys of the run's settings file."""
        token = str(self._folder / _TOKEN)
        return {
            "runtime.tls.ca_file": str(self._folder / f"{_AUTHORITY}.pem"),
            **self._shows(_PEOPLE),
            "runtime.tls.require_client_cert": True,
            "runtime.tokens.accept_file": token,
            "runtime.tokens.send_file": token,
        }

    @property
    def overrides(self) -> Mapping[Role, tuple[str, ...]]:
        """What each process is told by flag: the certificate it shows."""
        return {
            role: tuple(f"{key}={json.dumps(value)}" for key, value in self._shows(name).items())
            for role, name in _NAMES.items()
        }

    def write(self) -> None:
        """Into a folder that does not exist yet."""
        self._folder.mkdir(mode=0o700)
        authority = Authority(self._folder, _AUTHORITY)
        for name in (*_NAMES.values(), _PEOPLE):
            authority.issue(name)
        write_secret(self._folder / _TOKEN, secrets.token_urlsafe(32).encode() + b"\n")

    def _shows(self, name: str) -> dict[str, str]:
        stem = self._folder / f"{_AUTHORITY}-{name}"
        return {"runtime.tls.cert_file": f"{stem}.pem", "runtime.tls.key_file": f"{stem}.key"}
