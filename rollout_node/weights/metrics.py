"""What a weight sync shows of itself. Invariant: labels hold phases, never ids or versions."""

from __future__ import annotations

from prometheus_client import Histogram

SYNC_SECONDS = Histogram(
    "fermata_rollout_weight_sync_seconds",
    "Weight sync by phase: init, pause, receive, load, prove, paused (from Start to resumed generation)",
    ["phase"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
