"""The backend's metrics. Labels are names of tools and outcomes only, so their number is bounded."""

from __future__ import annotations

import prometheus_client

from node_runtime.metrics import TOOL_BUCKETS

CALLS = prometheus_client.Counter(
    "fermata_backend_calls_total", "Calls that ended here, by outcome.", ("tool", "outcome")
)
DURATION = prometheus_client.Histogram(
    "fermata_backend_call_duration_seconds", "From the start of a call to its end.", ("tool",), buckets=TOOL_BUCKETS
)
IN_FLIGHT = prometheus_client.Gauge("fermata_backend_calls_in_flight", "Calls that run now.", ("tool",))
