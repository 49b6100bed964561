"""The processes of a cluster: what each is called, started with and waited for. Pure.

Invariant: all processes read one settings file; only what cannot be the same for two of them (names, ports, cores) is
set by flag.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fermata_cli.cluster.cores import engine_cores
from fermata_cli.cluster.settings import BackendGroup, ClusterSettings


class Role(enum.Enum):
    """In the order in which a cluster starts; it stops the other way round."""

    BACKEND = "tool backend"
    GATEWAY = "gateway"
    ROLLOUT = "rollout node"
    TRAINER = "trainer"


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. `group`: processes that stand in for one another (replicas of a backend, rollout nodes)."""

    name: str
    role: Role
    group: str
    arguments: tuple[str, ...]  # after `python -m`
    overrides: tuple[str, ...]
    start_timeout_s: float
    restarts: int = 0

    def command(self, config: Path, parent_pid: int, extra: Sequence[str] = ()) -> list[str]:
        overrides = (
            f"runtime.node_name={self.name}",
            "runtime.exit_with_parent=true",
            f"runtime.parent_pid={parent_pid}",
            *self.overrides,
            *extra,
        )
        flags = [word for override in overrides for word in ("--set", override)]
        return [sys.executable, "-m", *self.arguments, "--config", str(config), *flags]


def backends(settings: ClusterSettings) -> list[ProcessSpec]:
    return [_backend(group, number, settings) for group in settings.backends for number in range(group.replicas)]


def _backend(group: BackendGroup, number: int, settings: ClusterSettings) -> ProcessSpec:
    return ProcessSpec(
        name=f"backend-{group.name}" if group.replicas == 1 else f"backend-{group.name}-{number}",
        role=Role.BACKEND,
        group=group.name,
        arguments=("tool_backend", *group.tools),
        overrides=("backend.port=0",),  # several read the same file
        start_timeout_s=settings.start.backend_s,
    )


def gateway(settings: ClusterSettings, addresses: Sequence[tuple[str, str]]) -> ProcessSpec:
    """`addresses`: (group, host:port) of each backend."""
    pools = [
        {"name": group.name, "addresses": [address for name, address in addresses if name == group.name]}
        for group in settings.backends
    ]
    return ProcessSpec(
        name="gateway",
        role=Role.GATEWAY,
        group="gateway",
        arguments=("tool_gateway",),
        overrides=(f"gateway.pools={json.dumps(pools)}",),
        start_timeout_s=settings.start.gateway_s,
        restarts=settings.gateway_restarts,
    )


def rollout_nodes(
    settings: ClusterSettings, gateway_address: str, cores: Sequence[int], bound: str | None
) -> list[ProcessSpec]:
    """`bound`: the cores the settings file names itself; they are left alone."""
    binds = engine_cores(cores if settings.bind_cores and bound is None else (), settings.rollout_nodes)
    specs = []
    for number, bind in enumerate(binds):
        overrides = [f"rollout.gateway={json.dumps([gateway_address])}"]
        if settings.rollout_nodes > 1:
            overrides.append("rollout.port=0")
        if bind is not None:
            overrides.append(f"rollout.engine.cpu_omp_threads_bind={bind}")
        specs.append(
            ProcessSpec(
                name=f"rollout-{number}",
                role=Role.ROLLOUT,
                group="rollout",
                arguments=("rollout_node",),
                overrides=tuple(overrides),
                start_timeout_s=settings.start.rollout_s,
            )
        )
    return specs


def trainer(settings: ClusterSettings, rollout_addresses: Sequence[str]) -> ProcessSpec:
    return ProcessSpec(
        name="trainer",
        role=Role.TRAINER,
        group="trainer",
        arguments=("trainer_node",),
        overrides=(f"trainer.rollout_nodes={json.dumps(list(rollout_addresses))}",),
        start_timeout_s=settings.start.trainer_s,
    )
