"""Prometheus metrics of the trainer.

Invariants: labels never hold ids; what was not measured yet is not a number (NaN), never 0.
"""

from __future__ import annotations

import math

from fermata.v1 import tool_pb2
from prometheus_client import Counter, Gauge, Histogram

from node_runtime.gpu_metrics import GpuMetrics
from node_runtime.outcomes import TABLE, outcome_name

REWARD_MEAN = Gauge("fermata_trainer_reward_mean", "Mean reward of the samples that the last step trained on")
STALENESS = Histogram(
    "fermata_trainer_staleness",
    "Weight versions between a consumed sample's oldest model token and the step that used it",
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
)
MASKED_SAMPLES = Counter("fermata_trainer_masked_samples_total", "Samples that could not be scored", ["cause"])
STALE_SAMPLES = Counter("fermata_trainer_stale_samples_total", "Samples dropped for being older than max_staleness")
STEP_PHASE_SECONDS = Histogram(
    "fermata_trainer_step_phase_seconds",
    "Seconds per phase of a step",
    ["phase"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
STEPS = Counter("fermata_trainer_steps_total", "Training steps done")
WEIGHT_VERSION = Gauge("fermata_trainer_weight_version", "Number of the weight version that was pushed last")
EVAL_ACCURACY = Gauge("fermata_trainer_eval_accuracy", "Accuracy of the last held-out evaluation")
LOGPROB_DIFF_MEAN = Gauge(
    "fermata_trainer_logprob_diff_mean", "Mean |trainer − sampler| log-probability over tokens of the version compared"
)
CALLS_LOST = Gauge("fermata_trainer_calls_lost", "Tool calls seen dispatched that never got a terminal outcome")
GPUS = GpuMetrics("fermata_trainer")

for _unknown in (REWARD_MEAN, EVAL_ACCURACY, LOGPROB_DIFF_MEAN):
    _unknown.set(math.nan)
# A rate needs a first value to rise from: faults of calls, and of reward functions, are shown with 0 from the start.
for _outcome, _row in TABLE.items():
    if _row.fault == tool_pb2.FAULT_INFRA and _outcome != tool_pb2.OUTCOME_UNSPECIFIED:
        MASKED_SAMPLES.labels(cause=outcome_name(_outcome))
for _cause in ("reward_error", "reward_timeout", "reward_not_finite"):
    MASKED_SAMPLES.labels(cause=_cause)
