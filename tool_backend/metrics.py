"""The backend's metrics. Labels are names of tools and outcomes only, so their number is bounded."""

from __future__ import annotations

import prometheus_client
from fermata.v1 import tool_pb2

from node_runtime.metrics import TOOL_BUCKETS
from node_runtime.outcomes import outcome_name

CALLS = prometheus_client.Counter(
    "fermata_backend_calls_total", "Calls that ended here, by outcome.", ("tool", "outcome")
)
DURATION = prometheus_client.Histogram(
    "fermata_backend_call_duration_seconds", "From the start of a call to its end.", ("tool",), buckets=TOOL_BUCKETS
)
IN_FLIGHT = prometheus_client.Gauge("fermata_backend_calls_in_flight", "Calls that run now.", ("tool",))


class ToolMetrics:
    """The metrics of one tool, with their labels looked up once."""

    def __init__(self, tool: str) -> None:
        self._tool = tool
        self._calls: dict[tool_pb2.Outcome, prometheus_client.Counter] = {}
        self._duration = DURATION.labels(tool)
        self._in_flight = IN_FLIGHT.labels(tool)

    def refused(self, outcome: tool_pb2.Outcome) -> None:
        """A call of this tool ended before it started."""
        counter = self._calls.get(outcome)
        if counter is None:
            counter = self._calls[outcome] = CALLS.labels(self._tool, outcome_name(outcome))
        counter.inc()

    def started(self) -> None:
        """A call of this tool runs."""
        self._in_flight.inc()

    def ended(self, outcome: tool_pb2.Outcome, seconds: float) -> None:
        """A call that ran has its end."""
        self._in_flight.dec()
        self._duration.observe(seconds)
        self.refused(outcome)
