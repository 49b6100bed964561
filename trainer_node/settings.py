"""Settings of the trainer node (section `trainer`).

Imports neither torch nor transformers, so that the command line can check a file without them. Invariant: what this
module accepts, the trainer can run; what it refuses, it refuses with the name of the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from node_runtime.settings import Section

LossAggregation = Literal["token", "sequence", "dr_grpo"]
AdvantageNormalisation = Literal["group_std", "none"]
OldPolicy = Literal["sampler", "recompute"]


class EvalSettings(Section):
    """Held-out evaluation, sampled at `temperature` through the same rollout nodes."""

    tasks: PositiveInt = Field(200, description="held-out tasks in the evaluations before and after")
    samples: PositiveInt = Field(1, description="samples per task")
    every: int = Field(0, ge=0, description="also evaluate every so many steps; 0: only before and after")
    every_tasks: PositiveInt = Field(64, description="held-out tasks in those evaluations in between")
    before: bool = True
    after: bool = True
    without_tools: bool = Field(True, description="at the end evaluate once more with no tool offered")
    temperature: float = Field(1.0, ge=0)
    success_reward: float = Field(1.0, description="a reward of at least this counts as solved")
    in_flight: PositiveInt = Field(256, description="evaluation trajectories open at once")
    max_refills: int = Field(3, ge=0, description="how often a masked evaluation sample is run again")
    timeout_s: PositiveFloat = Field(1800.0, description="for one whole evaluation")


class LimitSettings(Section):
    """Bounds handed to the rollout node for each trajectory; 0: the node's default."""

    max_turns: int = Field(0, ge=0)
    max_context_tokens: int = Field(0, ge=0)
    max_calls_per_turn: int = Field(0, ge=0)
    max_calls: int = Field(0, ge=0)
    max_consecutive_invalid_calls: int = Field(0, ge=0)
    max_tokens_per_turn: int = Field(0, ge=0)
    deadline_s: PositiveFloat = Field(600.0, description="for one trajectory from start to end")


class SyncSettings(Section):
    """Weight sync after each step, and the probes that prove it."""

    backend: Literal["gloo", "nccl"] = "gloo"
    host: str = Field("127.0.0.1", description="this machine, as the rollout nodes reach it")
    timeout_s: PositiveFloat = Field(60.0, description="for each step of a sync: start, transfer, finish")
    probes: PositiveInt = Field(4, description="probe prompts per proof")
    probe_tokens: PositiveInt = Field(48, ge=2, description="tokens of a probe at most")
    tolerance: float | None = Field(None, gt=0, description="largest log-probability difference; none: by dtype")


class DispatchSettings(Section):
    """How trajectories are spread over rollout nodes and moved from lost ones."""

    startup_timeout_s: PositiveFloat = Field(180.0, description="to wait for a rollout node at start")
    tools_timeout_s: PositiveFloat = Field(15.0, description="to wait at start for tools that tasks name")
    node_timeout_s: PositiveFloat = Field(300.0, description="to wait for any node once all are lost")
    reconnect_grace_s: PositiveFloat = Field(
        5.0, description="trajectories stay with a node whose stream broke so long, then they are moved"
    )
    silence_timeout_s: PositiveFloat = Field(30.0, description="a stream that says nothing so long is dead")
    reconnect_base_s: PositiveFloat = Field(0.2, description="full jitter, doubling from here")
    reconnect_max_s: PositiveFloat = 5.0
    max_moves: int = Field(8, ge=0, description="how often one trajectory is taken to another node, or run again")
    stop_grace_s: PositiveFloat = Field(5.0, description="to wait for the ends of cancelled trajectories")
    max_queued_events: PositiveInt = Field(65536, description="events waiting to be written to one node")


class MaskSettings(Section):
    """What to do when infrastructure takes samples away."""

    share_limit: float = Field(0.3, gt=0, le=1, description="above this masked share the run stops")
    window: PositiveInt = Field(512, description="samples over which the share is taken")
    min_samples: PositiveInt = Field(64, description="samples before it is judged at all")
    max_refills: int = Field(8, ge=0, description="replacement samples per group")


class TrainerSettings(Section):
    """Everything the trainer node reads. Paths are relative to the working directory."""

    model: Path = Field(..., description="Hugging Face folder of the policy")
    train_tasks: Path = Field(..., description="JSONL of tasks to train on")
    eval_tasks: Path | None = Field(None, description="JSONL of held-out tasks; none: no evaluation")
    reward: str = Field("exact_answer", description="`exact_answer` or `module:function`")
    reward_workers: PositiveInt = Field(1, description="threads that compute rewards")
    reward_timeout_s: PositiveFloat = 60.0
    rollout_nodes: tuple[str, ...] = Field(..., min_length=1, description="host:port of each rollout node")
    run_dir: Path = Path("runs/train")
    run_id: str | None = Field(None, description="none: made at start")
    seed: int = 0

    steps: int = Field(20, ge=0)
    groups_per_step: PositiveInt = 16
    group_size: int = Field(8, ge=2)
    in_flight_groups: int = Field(0, ge=0, description="groups open or waiting to be trained; 0: twice a step's")
    max_staleness: int = Field(4, ge=0, description="versions between a sample's oldest token and the step using it")
    temperature: float = Field(1.0, gt=0, description="of sampling; the trainer's log-probabilities use it too")
    limits: LimitSettings = Field(default_factory=LimitSettings)

    learning_rate: PositiveFloat = 1e-4
    warmup_steps: int = Field(0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: PositiveFloat = 1e-8
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, ge=0, description="largest norm of the gradient; 0: no clipping")
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.28, ge=0)
    loss_aggregation: LossAggregation = "token"
    advantage_normalisation: AdvantageNormalisation = "group_std"
    old_policy: OldPolicy = Field("sampler", description="denominator of the ratio: see loss.py")
    tis_cap: float = Field(2.0, gt=0, description="cap of truncated importance sampling with a recomputed old policy")
    minibatches: PositiveInt = Field(1, description="optimiser updates per step")
    dr_grpo_tokens: PositiveInt = Field(256, description="the constant length that Dr. GRPO divides by")

    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(1, ge=0, description="torch threads; 0: torch's own choice")
    device: str = Field("auto", description="auto, cpu or cuda")
    tokens_per_microbatch: PositiveInt = Field(4096, description="padded tokens in one forward pass")

    target_reward: float | None = Field(None, description="stop early once the mean reward reaches this ...")
    target_window: PositiveInt = Field(3, description="... over this many steps")
    target_accuracy: float | None = Field(None, ge=0, le=1, description="stop early at this accuracy (eval.every)")

    export: bool = Field(True, description="write the trained policy as a Hugging Face folder to run_dir/model")
    checkpoint_every: int = Field(0, ge=0, description="steps; 0: none")
    resume: bool = Field(False, description="go on from run_dir/checkpoint")

    eval: EvalSettings = Field(default_factory=EvalSettings)
    sync: SyncSettings = Field(default_factory=SyncSettings)
    dispatch: DispatchSettings = Field(default_factory=DispatchSettings)
    masked: MaskSettings = Field(default_factory=MaskSettings)

    @model_validator(mode="after")
    def _check(self) -> TrainerSettings:
        if 0 < self.in_flight_groups < self.groups_per_step:
            raise ValueError(
                f"in_flight_groups ({self.in_flight_groups}) must be 0 or at least groups_per_step "
                f"({self.groups_per_step}): a step could never be filled"
            )
        if self.minibatches > self.groups_per_step:
            raise ValueError(
                f"minibatches ({self.minibatches}) must not exceed groups_per_step ({self.groups_per_step})"
            )
        if self.target_accuracy is not None and not self.eval.every:
            raise ValueError("target_accuracy needs eval.every: without it nothing is evaluated while training")
        return self

    @property
    def open_groups(self) -> int:
        """Groups that may be generated or wait to be trained at one time."""
        return self.in_flight_groups or 2 * self.groups_per_step
