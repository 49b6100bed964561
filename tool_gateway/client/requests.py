"""A call as the caller means it, put into the wire's words. No state.

Invariant: the arguments' bytes are sent as they were given.
"""

from __future__ import annotations

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.keys import CallKey, args_sha256
from node_runtime.outcomes import make_final
from tool_gateway.client.types import CallOptions, Result

CallStart = gateway_pb2.ClientFrame.CallStart
_MAX_TIME_S = 30 * 86_400.0
"""Longest deadline, and greatest age, of a call: times beyond it do not all fit into the messages."""


def bounded(seconds: float) -> float:
    """From 0 to the longest time that is understood; what is no number is 0."""
    return min(seconds, _MAX_TIME_S) if seconds > 0 else 0.0


def local_result(start: CallStart, outcome: tool_pb2.Outcome, detail: str) -> Result:
    """A result that no gateway gave: the call was not sent."""
    text = detail if outcome == tool_pb2.OUTCOME_INVALID_ARGS else None  # the one of them that the model is shown
    return Result(start.key, start.tool, make_final(outcome, detail=detail, text=text, started=tool_pb2.STARTED_NO))


def call_start(key: CallKey, tool: str, args_json: bytes, options: CallOptions) -> CallStart:
    """The CallStart of a call, but for what changes with each sending."""
    start = CallStart(
        key=str(key),
        call_id=options.call_id,
        trajectory_id=key.trajectory_id,
        generation=key.generation if options.generation is None else options.generation,
        mode=CallStart.MODE_JOIN_ONLY if options.join_only else CallStart.MODE_START_OR_JOIN,
        tool=tool,
        args_json=args_json,
        args_sha256=args_sha256(args_json),
        weight_version=options.weight_version,
        group_id=options.group_id,
        cache_scope=options.cache_scope,
        priority=options.priority,
        traceparent=options.traceparent,
        context=options.context,
        max_output_bytes=options.max_output_bytes,
        grader=options.grader,
    )
    if options.earlier is not None:
        start.last_instance_id = options.earlier.instance_id
        start.last_attempt = options.earlier.attempt
    if options.session is not None:
        start.session.CopyFrom(options.session)
    for name in ("queue_timeout", "attempt_timeout", "heartbeat_timeout"):
        seconds = getattr(options, f"{name}_s")
        if seconds is not None:
            setattr(start, f"{name}_ms", max(1, int(seconds * 1000)))
    return start
