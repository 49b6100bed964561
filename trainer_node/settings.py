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
    before: bool = Field(True, description="evaluate before the first step")
    after: bool = Field(True, description="evaluate after the last step")
    without_tools: bool = Field(True, description="at the end evaluate once more with no tool offered")
    temperature: float = Field(1.0, ge=0, description="of sampling in evaluations; 0: greedy")
    success_reward: float = Field(1.0, description="a reward of at least this counts as solved")
    in_flight: PositiveInt = Field(256, description="evaluation trajectories open at once")
    max_refills: int = Field(3, ge=0, description="how often a masked evaluation sample is run again")
    timeout_s: PositiveFloat = Field(1800.0, description="for one whole evaluation")


class LimitSettings(Section):
    """Bounds handed to the rollout node for each trajectory; 0: the node's default."""

    max_turns: int = Field(0, ge=0, description="turns sampled")
    max_context_tokens: int = Field(0, ge=0, description="prompt, sampled and tool tokens together")
    max_calls_per_turn: int = Field(0, ge=0, description="calls of one turn that run; others are answered an error")
    max_calls: int = Field(0, ge=0, description="calls of the whole trajectory")
    max_consecutive_invalid_calls: int = Field(0, ge=0, description="calls in a row that could not be run")
    max_tokens_per_turn: int = Field(0, ge=0, description="tokens sampled in one turn")
    deadline_s: PositiveFloat = Field(600.0, description="seconds for one trajectory from start to end")


class SyncSettings(Section):
    """Weight sync after each step, and the probes that prove it."""

    backend: Literal["gloo", "nccl"] = Field(
        "gloo", description="how weights travel: nccl between GPUs, gloo between CPUs"
    )
    host: str = Field("127.0.0.1", description="this machine, as the rollout nodes reach it")
    timeout_s: PositiveFloat = Field(60.0, description="for each step of a sync: start, transfer, finish")
    probes: PositiveInt = Field(4, description="probe prompts per proof")
    probe_tokens: PositiveInt = Field(48, ge=2, description="tokens of a probe at most")
    tolerance: float | None = Field(
        None, gt=0, description="largest log-probability difference of a proof; null: by dtype"
    )


class DispatchSettings(Section):
    """How trajectories are spread over rollout nodes and moved from lost ones."""

    startup_timeout_s: PositiveFloat = Field(180.0, description="to wait for a rollout node at start")
    tools_timeout_s: PositiveFloat = Field(15.0, description="to wait at start for tools that tasks name")
    node_timeout_s: PositiveFloat = Field(300.0, description="to wait for any node once all are lost")
    reconnect_grace_s: PositiveFloat = Field(
        5.0, description="trajectories stay with a node whose stream broke so long, then they are moved"
    )
    silence_timeout_s: PositiveFloat = Field(30.0, description="a stream that says nothing so long is dead")
    reconnect_base_s: PositiveFloat = Field(
        0.2, description="first ceiling in seconds of the pause before reconnecting: full jitter, doubling"
    )
    reconnect_max_s: PositiveFloat = Field(
        5.0, description="longest pause in seconds between two attempts to reconnect"
    )
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
    eval_tasks: Path | None = Field(None, description="JSONL of held-out tasks; null: no evaluation")
    reward: str = Field("exact_answer", description="`exact_answer` or `module:function`")
    reward_workers: PositiveInt = Field(1, description="threads that compute rewards")
    reward_timeout_s: PositiveFloat = Field(60.0, description="seconds for one reward; longer masks the sample")
    rollout_nodes: tuple[str, ...] = Field(..., min_length=1, description="host:port of each rollout node")
    run_dir: Path = Field(Path("runs/train"), description="folder of the run's progress, summary, checkpoint and model")
    run_id: str | None = Field(None, description="name of the run in calls and spans; null: made at start")
    seed: int = Field(0, description="seed of task order, sampling and probes")

    steps: int = Field(20, ge=0, description="training steps")
    groups_per_step: PositiveInt = Field(16, description="groups trained on in one step")
    group_size: int = Field(8, ge=2, description="trajectories per task, compared with each other")
    in_flight_groups: int = Field(0, ge=0, description="groups open or waiting to be trained; 0: twice a step's")
    max_staleness: int = Field(4, ge=0, description="versions between a sample's oldest token and the step using it")
    temperature: float = Field(1.0, gt=0, description="of sampling; the trainer's log-probabilities use it too")
    limits: LimitSettings = Field(default_factory=LimitSettings)

    learning_rate: PositiveFloat = Field(1e-4, description="of AdamW, after the warm-up")
    warmup_steps: int = Field(
        0, ge=0, description="optimiser updates over which the learning rate rises in a straight line"
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay of the two moments")
    adam_eps: PositiveFloat = Field(1e-8, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    grad_clip: float = Field(1.0, ge=0, description="largest norm of the gradient; 0: no clipping")
    clip_low: float = Field(0.2, ge=0, lt=1, description="the ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.28, ge=0, description="the ratio is clipped above 1 + clip_high (clip-higher)")
    loss_aggregation: LossAggregation = Field(
        "token",
        description="what counts alike: every token (DAPO), every sequence (GRPO), or a constant length (Dr. GRPO)",
    )
    advantage_normalisation: AdvantageNormalisation = Field(
        "group_std", description="advantages divided by the group's deviation (GRPO), or not (Dr. GRPO)"
    )
    old_policy: OldPolicy = Field(
        "sampler",
        description="denominator of the ratio: the log-probabilities of sampling, or the trainer's own before the "
        "step, with truncated importance sampling beside them",
    )
    tis_cap: float = Field(2.0, gt=0, description="cap of truncated importance sampling with a recomputed old policy")
    minibatches: PositiveInt = Field(1, description="optimiser updates per step")
    dr_grpo_tokens: PositiveInt = Field(256, description="the constant length that Dr. GRPO divides by")

    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of the policy's weights, activations and moments; bfloat16 keeps no float32 copy of the weights, "
        "so the updates of small learning rates are lost in rounding",
    )
    threads: int = Field(1, ge=0, description="torch threads; 0: torch's own choice")
    device: str = Field("auto", description="auto, cpu or cuda")
    tokens_per_microbatch: PositiveInt = Field(4096, description="padded tokens in one forward pass")

    target_reward: float | None = Field(
        None, description="stop early once the mean reward over target_window steps reaches this"
    )
    target_window: PositiveInt = Field(3, description="steps over which target_reward is measured")
    target_accuracy: float | None = Field(None, ge=0, le=1, description="stop early at this accuracy (eval.every)")

    export: bool = Field(True, description="write the trained policy as a Hugging Face folder to run_dir/model")
    checkpoint_every: int = Field(0, ge=0, description="steps; 0: none")
    resume: bool = Field(False, description="go on from run_dir/checkpoint")
    stay: bool = Field(
        False,
        description="once the run has ended well, stay until stopped; a run that has ended in run_dir is not run again",
    )

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
