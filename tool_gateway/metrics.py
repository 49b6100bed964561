"""The gateway's Prometheus metrics. Invariant: labels are tool names, outcomes and faults; never ids."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from node_runtime.metrics import TOOL_BUCKETS

CALLS = Counter("fermata_gateway_calls", "Calls that reached their one outcome", ["tool", "outcome", "fault"])
CALL_DURATION = Histogram(
    "fermata_gateway_call_duration_seconds", "Acceptance to outcome, queueing included", ["tool"], buckets=TOOL_BUCKETS
)
CALLS_IN_FLIGHT = Gauge("fermata_gateway_calls_in_flight", "Calls accepted and not yet ended", ["tool"])
STREAMS = Gauge("fermata_gateway_streams", "Attach streams open")
ATTEMPTS = Counter("fermata_gateway_attempts", "Attempts by how they ended", ["tool", "outcome"])
BACKEND_SERVING = Gauge("fermata_gateway_backend_serving", "Backends that serve the tool now", ["tool"])
