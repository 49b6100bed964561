"""The gateway's Prometheus metrics.

Invariant: labels are names of the catalogue and of the settings, outcomes, faults and states; never ids, and never a
tool's name that only a caller wrote ("unknown" stands for those).
"""

from __future__ import annotations

from collections.abc import Iterable

from fermata.v1 import tool_pb2
from prometheus_client import Counter, Gauge, Histogram

from node_runtime.metrics import TOOL_BUCKETS
from node_runtime.outcomes import TABLE, Retry, fault_name, outcome_name

CALLS = Counter("fermata_gateway_calls", "Calls that reached their one outcome", ["tool", "outcome", "fault"])
CALL_DURATION = Histogram(
    "fermata_gateway_call_duration_seconds",
    "Acceptance to outcome, queueing included",
    ["tool", "fault"],
    buckets=TOOL_BUCKETS,
)
CALLS_IN_FLIGHT = Gauge("fermata_gateway_calls_in_flight", "Calls accepted and not yet ended", ["tool"])
OLDEST_CALL_AGE = Gauge("fermata_gateway_oldest_call_age_seconds", "Age of the oldest call in flight, 0 without calls")
STREAMS_ACTIVE = Gauge("fermata_gateway_streams_active", "Attach streams open")
QUEUE_DURATION = Histogram(
    "fermata_gateway_queue_duration_seconds",
    "What an attempt waited for a place on a backend, also where it got none",
    ["pool"],
    buckets=TOOL_BUCKETS,
)
ATTEMPTS = Counter("fermata_gateway_attempts", "Attempts by how they ended", ["pool", "outcome"])
ATTEMPT_DURATION = Histogram(
    "fermata_gateway_attempt_duration_seconds",
    "Commit of an attempt to its end, rejoining included",
    ["pool"],
    buckets=TOOL_BUCKETS,
)
RETRIES = Counter(
    "fermata_gateway_retries", "Attempts after which another one was granted, by how they ended", ["pool", "reason"]
)
BACKENDS = Gauge("fermata_gateway_backends", "Backend addresses by what may be sent there now", ["pool", "state"])
BACKEND_SERVING = Gauge("fermata_gateway_backend_serving", "Backends that serve the tool now", ["tool"])
DRAINING = Gauge("fermata_gateway_draining", "1 from the moment the gateway was asked to stop")
EVENT_LOOP_LAG = Gauge(
    "fermata_gateway_event_loop_lag_seconds", "How late the event loop was at worst, in the last 15 s or at present"
)

LOOK_UPS = Counter("fermata_gateway_dns_lookups", "Look-ups of the names of pools", ["pool", "outcome"])

BACKEND_STATES = ("serving", "draining", "down", "leaving", "duplicate")
"""Takes calls; is there and asked for none; nobody answers; its record is gone; another address of an instance that
takes calls at one."""


def outcome_label(outcome: tool_pb2.Outcome) -> str:
    """The outcome's name; numbers that only a newer backend knows share one label."""
    return outcome_name(outcome) if outcome in tool_pb2.Outcome.values() else "OTHER"


def fault_label(fault: tool_pb2.Fault) -> str:
    return fault_name(fault) if fault in tool_pb2.Fault.values() else "OTHER"


def prepare(pools: Iterable[str]) -> None:
    """Shows the pools' series with 0 from the start: a rate needs a first value to rise from."""
    for pool in pools:
        QUEUE_DURATION.labels(pool=pool)
        ATTEMPT_DURATION.labels(pool=pool)
        for outcome, row in TABLE.items():
            if row.retry is not Retry.NEVER:
                RETRIES.labels(pool=pool, reason=outcome_label(outcome))
        for state in BACKEND_STATES:
            BACKENDS.labels(pool=pool, state=state).set(0)


def prepare_tool(tool: str) -> None:
    """The same for a tool of the catalogue: the first fault of a run is to be seen in its rate too."""
    for outcome, row in TABLE.items():
        if outcome != tool_pb2.OUTCOME_UNSPECIFIED:
            CALLS.labels(tool=tool, outcome=outcome_label(outcome), fault=fault_label(row.fault))
