"""The gateway's section of the settings file (``gateway:``).

Invariant: every wait and every buffer has its bound here.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from node_runtime.addresses import is_unix, split
from node_runtime.errors import NodeError
from node_runtime.settings import Section

_LONGEST_S: Final = 30 * 86_400.0
"""Longest time a setting may name: each fits into the messages and timers that it reaches."""


class PoolSettings(Section):
    """Replicas of one backend: every address serves the same tools."""

    name: str = Field(min_length=1, description="name of the pool in logs and metrics")
    addresses: tuple[str, ...] = Field(
        default=(), description="host:port of each replica; a pool has either addresses or dns"
    )
    dns: str | None = Field(
        default=None,
        description="name:port; every A and AAAA record of the name (a headless Service) is a replica, and the pool "
        "follows the records",
    )
    resolve_s: float = Field(default=5.0, ge=0.1, le=_LONGEST_S, description="between two look-ups of dns")
    max_addresses: int = Field(default=256, ge=1, le=65_536, description="most records of dns that are used")

    @field_validator("addresses")
    @classmethod
    def _host_and_port(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            try:
                if not is_unix(address):
                    split(address)
            except NodeError as error:
                raise ValueError(str(error)) from None
        if len(set(addresses)) != len(addresses):
            raise ValueError("names an address twice: name each replica once")
        return addresses

    @field_validator("dns")
    @classmethod
    def _name_and_port(cls, dns: str | None) -> str | None:
        if dns is None:
            return None
        try:
            host, _port = split(dns)
        except NodeError as error:
            raise ValueError(str(error)) from None
        if is_unix(dns) or _is_number(host):
            raise ValueError(f"names {dns!r}, which is no name to look up: write it under addresses")
        return dns

    @model_validator(mode="after")
    def _one_source(self) -> PoolSettings:
        if bool(self.addresses) == (self.dns is not None):
            has = "both addresses and dns" if self.addresses else "neither addresses nor dns"
            raise ValueError(f"has {has}: name the replicas in addresses, or a name that resolves to them in dns")
        return self


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class RetrySettings(Section):
    """Attempts per call and the pause between them: full jitter under a doubling ceiling."""

    attempts: int = Field(default=3, ge=1, le=20, description="attempts per call, the first one included")
    base_s: float = Field(default=0.2, gt=0, le=_LONGEST_S, description="ceiling of the first pause")
    max_s: float = Field(default=5.0, gt=0, le=_LONGEST_S, description="highest ceiling")
    rejoin_s: float = Field(
        default=10.0,
        ge=0,
        le=_LONGEST_S,
        description="how long the instance that holds a non-idempotent call is sought before INDETERMINATE",
    )
    rejoin_idempotent_s: float = Field(
        default=1.0, ge=0, le=_LONGEST_S, description="the same for an idempotent call, which may run elsewhere instead"
    )


class LedgerSettings(Section):
    """What the ledger holds, and when it is safe."""

    max_entries: int = Field(default=200_000, ge=1, description="calls held; more are refused with OVERLOADED")
    max_bytes: int = Field(
        default=1 << 30, ge=1 << 16, description="bytes of requests and results held; acknowledged ones go first"
    )
    retention_s: float = Field(
        default=3600.0, gt=0, le=_LONGEST_S, description="a result nobody released is kept this long"
    )
    synchronous: Literal["normal", "full"] = Field(
        default="normal",
        description="with gateway.data_dir: the ledger survives a killed process (normal) or a killed host (full)",
    )


class LimitSettings(Section):
    """What one call or one stream may ask for."""

    credits: int = Field(default=256, ge=1, le=65_536, description="calls a client may have sent and not yet accepted")
    window_bytes: int = Field(
        default=8 << 20, ge=1 << 16, description="most bytes of unacknowledged results per session"
    )
    frame_bytes: int = Field(
        default=64 << 10, ge=1 << 12, le=16 << 20, description="a frame takes what is ready up to this size"
    )
    max_args_bytes: int = Field(default=1 << 20, ge=1, description="largest arguments of a call")
    max_output_bytes: int = Field(
        default=1 << 20, ge=1 << 10, le=32 << 20, description="largest output handed on; a tool may ask for less"
    )
    max_sessions: int = Field(default=10_000, ge=1, description="sessions held, with or without a stream")


class TimeoutSettings(Section):
    """Times in seconds."""

    default_call_s: float = Field(
        default=60.0, gt=0, le=_LONGEST_S, description="deadline of a call where neither caller nor tool names one"
    )
    max_call_s: float = Field(default=3600.0, gt=0, le=_LONGEST_S, description="longest deadline granted")
    heartbeat_s: float = Field(
        default=15.0, gt=0, le=_LONGEST_S, description="a streaming backend silent for longer has lost the attempt"
    )
    describe_s: float = Field(default=5.0, gt=0, le=_LONGEST_S, description="time for Describe")
    control_s: float = Field(
        default=3.0, gt=0, le=_LONGEST_S, description="time for Cancel, and for a backend's first answer to Attach"
    )
    look_up_s: float = Field(default=5.0, gt=0, le=_LONGEST_S, description="time for one look-up of a pool's dns name")
    leave_s: float = Field(
        default=60.0,
        ge=1.0,
        le=_LONGEST_S,
        description="a backend whose record is gone stays connected until it was idle for this long: calls of another "
        "gateway may still run there",
    )
    margin: float = Field(default=0.05, ge=0, lt=0.5, description="share of the remaining time kept back at this hop")
    margin_max_s: float = Field(default=0.5, ge=0, le=_LONGEST_S, description="most that is kept back")


class GatewaySettings(Section):
    """One gateway process."""

    host: str = Field(default="127.0.0.1", description="address served on")
    port: int = Field(default=7000, ge=0, le=65535, description="port served on; 0: a free one")
    gateway_id: str | None = Field(
        default=None, min_length=1, description="name told to clients; default: the node's name"
    )
    data_dir: Path | None = Field(
        default=None,
        description="folder of the call ledger (SQLite), for this gateway alone; null: the ledger is in memory",
    )
    pools: tuple[PoolSettings, ...] = Field(default=(), description="backend pools")
    heartbeat_interval_s: float = Field(
        default=5.0, ge=0.05, le=_LONGEST_S, description="between pings; three missed and the peer is dead"
    )
    resume_window_s: float = Field(
        default=120.0, ge=0, le=_LONGEST_S, description="a session without a stream is kept this long"
    )
    drain_s: float = Field(
        default=15.0, ge=0, le=_LONGEST_S, description="after SIGTERM, calls in flight get this long to end"
    )
    retry: RetrySettings = RetrySettings()
    ledger: LedgerSettings = LedgerSettings()
    limits: LimitSettings = LimitSettings()
    timeouts: TimeoutSettings = TimeoutSettings()

    @model_validator(mode="after")
    def _addresses_once(self) -> GatewaySettings:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError("names a pool twice: give each pool its own name")
        addresses = [address for pool in self.pools for address in (pool.addresses or (pool.dns,))]
        if len(set(addresses)) != len(addresses):
            raise ValueError("has an address in two pools: an address belongs to one pool")
        return self
