"""One turn from submission to its end: exact ids in, sampled ids and their calls out.

Invariants: the request carries the trajectory's own ids and nothing else; a call leaves at its closing token, while the
turn goes on; a request that ends unasked fails the trajectory, it is never taken for a turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from fermata.v1 import tool_pb2

from rollout_node import metrics
from rollout_node.admission import AdmissionPolicy
from rollout_node.call import Call
from rollout_node.engine import SamplingSpec
from rollout_node.ports import Engine, TurnFormat
from rollout_node.trajectory import Fail, Step, Trajectory

_SEED_STEP = 1_000_003  # turns of one trajectory sample with different seeds


class TurnSampler:
    """`send` dispatches a call."""

    def __init__(
        self,
        engine: Engine,
        turns: TurnFormat,
        policy: AdmissionPolicy,
        send: Callable[[Trajectory, Call], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._turns = turns
        self._policy = policy
        self._send = send
        self._clock = clock

    async def sample(self, trajectory: Trajectory) -> tuple[Step, list[Call]]:
        """What follows the turn, and the calls that only its end closed. Raises EngineError.

        Bounded by max_tokens, and in time by the trajectory's deadline, which cancels this task.
        """
        spec = trajectory.spec
        stream = self._turns.stream(spec.offer.tools, trajectory.columns.ids)
        request_id = f"{spec.run_id}/{spec.trajectory_id}/{spec.generation}/{trajectory.turn}"
        priority = self._policy.priority(spec.order, returning=trajectory.returning)
        request = self._engine.generate(request_id, trajectory.columns.ids[:], self._spec(trajectory), priority)
        reason: str | None = None
        async with contextlib.aclosing(request) as deltas:
            async for delta in deltas:
                if trajectory.resumed_at is not None and len(delta.token_ids):
                    metrics.RESUME_TO_FIRST_TOKEN.observe(self._clock() - trajectory.resumed_at)
                    trajectory.resumed_at = None
                trajectory.sampled(delta.token_ids, delta.logprobs, delta.version, kv_kept=delta.kv_kept)
                metrics.TOKENS.labels("model").inc(len(delta.token_ids))
                for parsed in stream.feed(delta.token_ids):
                    call = trajectory.call_closed(parsed, self._clock())
                    if call is not None:
                        self._send(trajectory, call)
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                    break
        if reason not in ("stop", "length"):
            sentence = f"the engine ended request {request_id} ({reason or 'no reason'}) and nobody had asked it to"
            return Fail(tool_pb2.FAULT_INFRA, tool_pb2.OUTCOME_INTERNAL, sentence), []
        return trajectory.end_turn(stream.finish(reason), self._clock())

    def _spec(self, trajectory: Trajectory) -> SamplingSpec:
        asked = trajectory.spec.sampling
        return SamplingSpec(
            max_tokens=trajectory.max_tokens(),
            temperature=asked.temperature,
            top_p=asked.top_p or 1.0,
            top_k=asked.top_k,
            min_p=asked.min_p,
            seed=(asked.seed + trajectory.turn * _SEED_STEP) % 2**63 if asked.HasField("seed") else None,
            stop_token_ids=tuple(self._turns.stop_token_ids),
        )
