"""What the trajectory loop needs of its surroundings, and no more: an engine, a model's turn format, a tool caller.

`rollout_node.engine.Engine`, `rollout_node.turn.TurnFormat` and `tool_gateway.client.ToolGateway` satisfy these; tests
put scripted ones in their place. Invariant: the loop touches nothing of them that is not named here.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fermata.v1 import tool_pb2
from fermata.v1.weights_pb2 import WeightVersion

from rollout_node.engine import Delta, EngineStats, SamplingSpec
from rollout_node.turn.records import Message, ParsedCall, ParsedTurn, RenderedAnswer, ToolAnswer, ToolDefinition
from rollout_node.turn.tool_set import ToolSet
from tool_gateway.client import CallOptions, OnEvent, Result


class Engine(Protocol):
    version: WeightVersion
    model_hash: str
    max_model_len: int
    kv_tokens: int
    on_serving: list[Callable[[bool, str], None]]

    @property
    def serving(self) -> bool: ...
    @property
    def why_not(self) -> str: ...
    async def ended(self) -> str:
        """Returns, with one sentence, once the engine is no more."""
        ...

    def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingSpec, priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """Closing the iterator aborts the request. Raises EngineError."""
        ...

    def stats(self) -> EngineStats: ...


class TurnStream(Protocol):
    def feed(self, new_ids: Sequence[int]) -> Sequence[ParsedCall]: ...
    def finish(self, reason: str) -> ParsedTurn: ...


class TurnFormat(Protocol):
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def tokenizer_hash(self) -> str: ...
    @property
    def template_hash(self) -> str: ...
    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> array[int]:
        """Raises RenderError for messages that cannot be rendered."""
        ...

    def stream(self, tools: ToolSet, prompt_ids: Sequence[int]) -> TurnStream: ...
    def render_results(
        self, ids: Sequence[int], answers: Sequence[ToolAnswer], budget_tokens: int
    ) -> list[RenderedAnswer]:
        """Raises BudgetExceeded."""
        ...


class ToolCaller(Protocol):
    """See `tool_gateway.client.ToolCaller`: one Result per call, at its deadline at the latest."""

    @property
    def connected(self) -> bool: ...
    @property
    def catalogue(self) -> Mapping[str, tool_pb2.ToolSpec]: ...
    async def call(
        self,
        *,
        key: str,
        tool: str,
        args_json: bytes,
        deadline_s: float,
        on_event: OnEvent | None = None,
        options: CallOptions | None = None,
    ) -> Result: ...
    def cancel(self, key: str, reason: str = "") -> None: ...
    def release(self, keys: Iterable[str]) -> None: ...
    def release_trajectory(self, trajectory_id: str, generation: int) -> None: ...
    def fence(self, trajectory_id: str, generation: int, keep_keys: Iterable[str] = ()) -> None: ...


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a task, built once per combination and shared by its trajectories."""

    tools: ToolSet
    definitions: tuple[ToolDefinition, ...] = ()
    declared_s: Mapping[str, float] = field(default_factory=dict)  # longest time a tool declares for itself
