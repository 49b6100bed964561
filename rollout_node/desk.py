"""Calls on their way: sends them through the run's gateway client and brings each result to the trajectory it is for.

Invariants: one task per unresolved call (none per trajectory) and each is owned by the loop's task group; a result goes
to the trajectory that holds the key now, so a trajectory taken up anew inherits what its predecessor waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime import outcomes
from node_runtime.logs import get_logger
from node_runtime.spans import Span, SpanWriter
from rollout_node import metrics
from rollout_node.call import Call
from rollout_node.ports import ToolCaller
from rollout_node.trajectory import Trajectory
from tool_gateway.client import CallOptions, Earlier, Result

# A call whose time ran out while its snapshot lay still may have its result waiting: long enough to fetch it.
_FETCH_S = 2.0

log = get_logger("rollout_node.desk")


class CallDesk:
    """`on_result(trajectory, key, result)` is called on the event loop, once per call and owner."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        on_result: Callable[[Trajectory, str, Result], None],
        spans: SpanWriter,
        clock: Callable[[], float],
    ) -> None:
        self._spawn = spawn
        self._on_result = on_result
        self._spans = spans
        self._clock = clock
        self._owners: dict[str, Trajectory] = {}
        self._callers: dict[str, ToolCaller] = {}
        self._left: set[str] = set()  # keys that were let go and have not ended

    def use(self, run_id: str, caller: ToolCaller) -> None:
        self._callers[run_id] = caller

    def caller(self, run_id: str) -> ToolCaller | None:
        return self._callers.get(run_id)

    @property
    def left_running(self) -> int:
        """Calls that another owner may want: let go, and without a result yet."""
        return len(self._left)

    def send(self, trajectory: Trajectory, call: Call, *, rejoin: bool = False, grader: bool = False) -> None:
        """Dispatch now. `rejoin`: the key may have been sent before, by whoever made the snapshot."""
        self._owners[call.key] = trajectory
        self._left.discard(call.key)
        spec = trajectory.spec
        now = self._clock()
        remaining_s = call.deadline_at - now
        version = trajectory.last_version
        options = CallOptions(
            call_id=call.key,
            generation=spec.generation,
            join_only=rejoin and remaining_s <= 0,
            earlier=Earlier(now - call.first_at, call.instance_id, call.last_attempt) if rejoin else None,
            priority=spec.order,
            weight_version=version.number if version is not None else 0,
            group_id=spec.group_id,
            grader=grader,
            traceparent=spec.traceparent,
            context=spec.context,
        )
        deadline_s = remaining_s if remaining_s > 0 else _FETCH_S
        self._spawn(self._run(self._callers[spec.run_id], trajectory, call, deadline_s, options), f"call {call.key}")

    async def _run(
        self, caller: ToolCaller, sender: Trajectory, call: Call, deadline_s: float, options: CallOptions
    ) -> None:
        def on_event(notice: object) -> None:
            if isinstance(notice, gateway_pb2.ServerFrame.Started):
                call.instance_id, call.last_attempt = notice.instance_id, notice.attempt

        began = time.time()
        try:
            result = await caller.call(
                key=call.key,
                tool=call.tool,
                args_json=call.args_json,
                deadline_s=deadline_s,
                on_event=on_event,
                options=options,
            )
        except Exception as error:
            # The client's contract is a result whatever happens; if it breaks it, one sample is masked, not the node.
            log.exception("a call ended without a result", key=call.key)
            final = outcomes.make_final(tool_pb2.OUTCOME_INTERNAL, detail=f"{type(error).__name__}: {error}")
            result = Result(call.key, call.tool, final)
        ended = time.time()
        metrics.TOOL_WAIT.labels(call.tool).observe(ended - began)
        self._record(sender, call, result, began, ended)
        owner = self._owners.pop(call.key, None)
        if owner is None:
            self._left.discard(call.key)
        else:
            self._on_result(owner, call.key, result)

    def _record(self, trajectory: Trajectory, call: Call, result: Result, began: float, ended: float) -> None:
        spec = trajectory.spec
        self._spans.record(
            Span(
                kind="tool-run",
                node=self._spans.node,
                start=began,
                end=ended,
                trajectory=spec.trajectory_id,
                generation=spec.generation,
                turn=int(call.key.rsplit("/", 2)[1]),
                tool=call.tool,
                call_key=call.key,
                outcome=outcomes.outcome_name(result.outcome),
                attempt=result.attempts,
                weight_version=options_version(trajectory),
                attributes={"seen_from": "node", "queue_us": result.queue_us, "run_us": result.run_us},
            )
        )

    def cancel(self, run_id: str, calls: Iterable[Call], reason: str) -> None:
        """Stop calls nobody waits for any more; their results go nowhere."""
        caller = self._callers.get(run_id)
        for call in calls:
            if self._owners.pop(call.key, None) is not None and caller is not None:
                caller.cancel(call.key, reason)

    def let_go(self, trajectory: Trajectory) -> None:
        """The trajectory is another owner's now: its calls run on, what they bring is not for us."""
        for call in trajectory.open_calls:
            if self._owners.get(call.key) is trajectory:
                del self._owners[call.key]
                self._left.add(call.key)


def options_version(trajectory: Trajectory) -> int | None:
    return trajectory.last_version.number if trajectory.last_version is not None else None
