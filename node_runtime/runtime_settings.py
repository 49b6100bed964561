"""The `runtime` section, shared by every process: names, logs, metrics, spans, TLS, tokens and shutdown.

Invariant: importing it costs pydantic only; secrets are never values here, only paths of files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from node_runtime.addresses import is_host
from node_runtime.settings import Section


class TlsSettings(Section):
    """TLS is on, for serving and for connecting, as soon as one of the files is named."""

    ca_file: Path | None = Field(
        default=None, description="PEM of the authorities trusted; without it the system's own"
    )
    cert_file: Path | None = Field(default=None, description="PEM chain this process shows to its peers")
    key_file: Path | None = Field(default=None, description="PEM private key of cert_file")
    require_client_cert: bool = Field(
        default=False, description="refuse clients without a certificate of ca_file (mutual TLS)"
    )
    server_name: str | None = Field(
        default=None, description="name expected in server certificates, where it is not the host"
    )

    @field_validator("server_name")
    @classmethod
    def _is_name(cls, name: str | None) -> str | None:
        if name is not None and not is_host(name):
            raise ValueError(f"{name!r} can be no name of a server: write it as it stands in the certificate")
        return name

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            missing = "key_file" if self.key_file is None else "cert_file"
            raise ValueError(f"names only one of cert_file and key_file: name {missing} too, they belong together")
        if self.require_client_cert and (self.ca_file is None or self.cert_file is None):
            raise ValueError("require_client_cert needs ca_file, cert_file and key_file: name all three")
        return self

    @property
    def enabled(self) -> bool:
        return self.ca_file is not None or self.cert_file is not None


class TokenSettings(Section):
    """Bearer tokens, by file: one token a line, empty lines and lines that begin with # are skipped."""

    accept_file: Path | None = Field(
        default=None, description="tokens that callers may show; without it callers show none"
    )
    send_file: Path | None = Field(default=None, description="the token shown to peers is this file's first")


class RuntimeSettings(Section):
    """What every process shares."""

    node_name: str | None = Field(
        default=None, min_length=1, max_length=128, description="name in logs and spans; default: process and host"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="lowest level logged")
    log_format: Literal["json", "console"] = Field(default="console", description="form of the log lines on stderr")
    metrics_host: str = Field(default="127.0.0.1", description="address /metrics listens on")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="port of /metrics; 0: a free one, null: off"
    )
    metrics_tls: bool = Field(
        default=False, description="the metrics port speaks TLS with tls.cert_file, and asks for no client certificate"
    )
    liveness_s: float = Field(
        default=30.0, ge=1, le=3600, description="seconds an event loop may stand still before /healthz calls it dead"
    )
    spans_dir: Path | None = Field(default=None, description="folder of the span files; null: none are written")
    tls: TlsSettings = TlsSettings()
    tokens: TokenSettings = TokenSettings()
    shutdown_grace_s: float = Field(default=20.0, gt=0, le=3600, description="seconds an orderly stop may take")
    exit_with_parent: bool = Field(
        default=False, description="stop when the process that started this one ends (Linux)"
    )
    parent_pid: int | None = Field(
        default=None,
        gt=0,
        description="with exit_with_parent: the parent's process id, to notice one that ended before",
    )

    @model_validator(mode="after")
    def _metrics_certificate(self) -> Self:
        if self.metrics_tls and self.tls.cert_file is None:
            raise ValueError("metrics_tls needs a certificate: name tls.cert_file and tls.key_file")
        return self
