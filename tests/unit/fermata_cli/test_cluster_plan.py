"""Which processes a cluster has, with what flags, on which cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fermata_cli.cluster import plan
from fermata_cli.cluster.cores import engine_cores, trainer_cores
from fermata_cli.cluster.plan import Role
from fermata_cli.cluster.settings import BackendGroup, ClusterSettings


def test_backends_are_pools_of_replicas() -> None:
    settings = ClusterSettings(
        backends=(
            BackendGroup(name="calculator", tools=("calculator",), replicas=2),
            BackendGroup(name="mine", tools=("m:t",)),
        )
    )
    specs = plan.backends(settings)
    assert [spec.name for spec in specs] == ["backend-calculator-0", "backend-calculator-1", "backend-mine"]
    assert specs[2].arguments == ("tool_backend", "m:t")
    gateway = plan.gateway(settings, [("calculator", "h:1"), ("calculator", "h:2"), ("mine", "h:3")])
    pools = json.loads(next(o for o in gateway.overrides if o.startswith("gateway.pools=")).partition("=")[2])
    assert pools == [{"name": "calculator", "addresses": ["h:1", "h:2"]}, {"name": "mine", "addresses": ["h:3"]}]
    assert gateway.restarts == settings.gateway_restarts


def test_every_process_ends_with_its_parent_and_reads_the_one_file() -> None:
    settings = ClusterSettings()
    specs = [*plan.backends(settings), plan.gateway(settings, []), *plan.rollout_nodes(settings, "h:1", (0, 1), None)]
    for spec in (*specs, plan.trainer(settings, ["h:2"])):
        command = spec.command(Path("fermata.yaml"), 42)
        assert command[command.index("--config") + 1] == "fermata.yaml"
        assert {"runtime.exit_with_parent=true", "runtime.parent_pid=42", f"runtime.node_name={spec.name}"} <= set(
            command
        )


@pytest.mark.parametrize(
    ("cores", "engines", "expected", "others"),
    [
        ((0, 1), 1, ["0"], (1,)),
        ((0,), 1, ["0"], (0,)),
        ((0, 1), 2, ["0", "1"], (0, 1)),
        ((4, 5, 6, 7), 2, ["4", "5"], (6, 7)),
        ((3,), 2, ["3", "3"], (3,)),
        ((), 1, [None], ()),
    ],
)
def test_cores(cores: tuple[int, ...], engines: int, expected: list[str | None], others: tuple[int, ...]) -> None:
    assert engine_cores(cores, engines) == expected
    assert trainer_cores(cores, engines) == others


def test_engines_are_bound_unless_the_file_says_where() -> None:
    settings = ClusterSettings(rollout_nodes=2)
    bound = plan.rollout_nodes(settings, "h:1", (0, 1), None)
    assert [_bind(spec) for spec in bound] == [
        "rollout.engine.cpu_omp_threads_bind=0",
        "rollout.engine.cpu_omp_threads_bind=1",
    ]
    assert all(spec.role is Role.ROLLOUT and "rollout.port=0" in spec.overrides for spec in bound)
    assert [_bind(spec) for spec in plan.rollout_nodes(settings, "h:1", (0, 1), "0-1")] == [None, None]


def _bind(spec: plan.ProcessSpec) -> str | None:
    return next((override for override in spec.overrides if "threads_bind" in override), None)


def test_a_backend_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="names a backend twice"):
        ClusterSettings(
            backends=(BackendGroup(name="a", tools=("calculator",)), BackendGroup(name="a", tools=("search",)))
        )
