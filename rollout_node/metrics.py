"""The rollout node's metrics. Invariant: labels hold states, kinds, tools and phases, never ids."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge, Histogram

from node_runtime.gpu_metrics import GpuMetrics
from node_runtime.metrics import TOOL_BUCKETS
from rollout_node.trajectory import State

TRAJECTORIES = Gauge("fermata_rollout_trajectories", "Open trajectories by state", ["state"])
ENDED = Counter("fermata_rollout_trajectories_ended_total", "Trajectories ended, by how", ["end"])
TOKENS = Counter("fermata_rollout_tokens_total", "Tokens by kind: prompt, model (sampled), tool (results)", ["kind"])
RESUME_TO_FIRST_TOKEN = Histogram(
    "fermata_rollout_resume_to_first_token_seconds",
    "From the last result of a turn's calls to the first token of the next turn",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
TOOL_WAIT = Histogram(
    "fermata_rollout_tool_wait_seconds",
    "From a call's closing token to its result, as the node sees it",
    ["tool"],
    buckets=TOOL_BUCKETS,
)
WEIGHT_VERSION = Gauge("fermata_rollout_weight_version", "Number of the weight version served")
GPUS = GpuMetrics("fermata_rollout")


def show_states(counts: Mapping[State, int]) -> None:
    """Set the gauges from the numbers of open trajectories."""
    for state in (State.QUEUED, State.GENERATING, State.PARKED):
        TRAJECTORIES.labels(state.value).set(counts.get(state, 0))
