"""The `cluster` section: which processes a local cluster has, and how long each may take to start and to stop."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from node_runtime.settings import Section


class BackendGroup(Section):
    """Replicas of one tool backend; together they are one pool of the gateway."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of the pool")
    tools: tuple[str, ...] = Field(min_length=1, description="built-in tools, or module:object")
    replicas: PositiveInt = Field(1, le=16, description="processes of this backend")


class StartSettings(Section):
    """Seconds a process may take from its start to its ready line."""

    backend_s: PositiveFloat = Field(60.0, description="for a tool backend, its imports included")
    gateway_s: PositiveFloat = Field(60.0, description="for the gateway")
    tools_s: PositiveFloat = Field(20.0, description="until the gateway serves all tools that the tasks name")
    rollout_s: PositiveFloat = Field(300.0, description="for a rollout node, loading the engine included")
    trainer_s: PositiveFloat = Field(120.0, description="for the trainer, loading the policy included")


class ClusterSettings(Section):
    """A cluster on this machine, started and watched by one command."""

    backends: tuple[BackendGroup, ...] = Field(
        (BackendGroup(name="calculator", tools=("calculator",)), BackendGroup(name="search", tools=("search",))),
        min_length=1,
        description="tool backends",
    )
    rollout_nodes: PositiveInt = Field(1, le=8, description="rollout nodes, each with an engine of its own")
    gateway_restarts: int = Field(3, ge=0, description="how often a gateway that died is started again")
    bind_cores: bool = Field(True, description="on CPUs give each engine a core of its own, and the trainer the others")
    start: StartSettings = StartSettings()
    stop_grace_s: PositiveFloat = Field(20.0, description="after SIGTERM; then what is left is killed")

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        names = [backend.name for backend in self.backends]
        if len(set(names)) != len(names):
            raise ValueError("names a backend twice: give each its own name")
        return self
