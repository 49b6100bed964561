"""Settings of the rollout node (section `rollout`). Imports without torch and vLLM.

Invariant: each limit has a default here, so that a task which names none is bounded all the same.
"""

from __future__ import annotations

from typing import Self

import pydantic
from pydantic import Field, PositiveFloat, PositiveInt

from node_runtime.settings import Section
from rollout_node.engine_settings import EngineSettings


class LimitSettings(Section):
    """What bounds a trajectory whose task does not say."""

    max_turns: PositiveInt = Field(16, description="turns sampled")
    max_context_tokens: PositiveInt | None = Field(
        None, description="prompt, sampled and tool tokens together; null: what the engine holds"
    )
    max_calls_per_turn: PositiveInt = Field(16, description="calls of one turn that run; others are answered an error")
    max_consecutive_invalid_calls: PositiveInt = Field(4, description="calls in a row that could not be run")
    max_calls: PositiveInt = Field(128, description="calls of the whole trajectory")
    max_tokens_per_turn: PositiveInt = Field(1024, description="tokens sampled in one turn")
    min_turn_tokens: PositiveInt = Field(8, description="tokens kept free for the turn after tool results")
    deadline_s: PositiveFloat = Field(3600.0, description="for one trajectory from acceptance to its end")
    call_deadline_s: PositiveFloat = Field(300.0, description="for one tool call; longer where the tool declares more")


class AdmissionSettings(Section):
    """When a new trajectory is let into the engine."""

    max_trajectories: PositiveInt = Field(1024, description="open at once; more are rejected with retry_after")
    busy_requests: PositiveInt = Field(
        32, description="requests in the engine from which it counts as busy; below, nobody is held back"
    )
    kv_tokens: PositiveInt | None = Field(None, description="tokens the KV cache holds; null: as the engine says")
    retry_after_s: PositiveFloat = Field(1.0, description="pushback of a rejection for want of room")


class RolloutSettings(Section):
    """Everything the rollout node reads."""

    host: str = Field("127.0.0.1", description="address the node listens on")
    port: int = Field(0, ge=0, le=65535, description="port of the node; 0: a free one, told in the ready line")
    model: str = Field(..., min_length=1, description="Hugging Face folder of the model")
    model_id: str = Field("", description="name under which tasks ask for the model; empty: any name is served")
    gateway: tuple[str, ...] = Field(
        ("127.0.0.1:7000",), min_length=1, description="host:port of each tool gateway; one is used at a time"
    )
    gateway_wait_s: PositiveFloat = Field(60.0, description="to wait for a gateway at start")
    catalogue_wait_s: PositiveFloat = Field(10.0, description="to wait for a tool that a task names and nobody serves")
    reconnect_window_s: PositiveFloat = Field(
        60.0, description="trajectories outlive the trainer's stream this long, then they are cancelled"
    )
    handover_s: PositiveFloat = Field(10.0, description="of the grace at shutdown, to finish turns and hand over")
    load_interval_s: PositiveFloat = Field(1.0, description="between two Load events")
    kept_ends: PositiveInt = Field(1024, description="unacknowledged ends kept for a trainer that reconnects")
    max_frame_bytes: PositiveInt = Field(1 << 20, description="of events in one frame to the trainer")
    renderer: str = Field("auto", description="chat renderer: auto, or a name of the renderers library")
    parser: str = Field(
        "hermes",
        description="form of tool calls: hermes, or hermes-text where the tags are no control tokens",
    )
    engine: EngineSettings = EngineSettings()
    limits: LimitSettings = LimitSettings()
    admission: AdmissionSettings = AdmissionSettings()

    @pydantic.model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.engine.model and self.engine.model != self.model:
            raise ValueError(
                f"engine.model ({self.engine.model}) and model ({self.model}) differ: name the folder in model alone"
            )
        return self

    @property
    def engine_settings(self) -> EngineSettings:
        """The engine's settings with the model filled in."""
        return self.engine.model_copy(update={"model": self.model})
