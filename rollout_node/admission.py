"""Who may enter the engine next.

Owns the decision, not the queue. Invariants: a returning trajectory is never held back; a new one is held back only
while the engine is busy and its tokens would push parked prefixes out of the KV cache, so an idle engine never waits.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# vLLM serves lower priorities first and preempts the highest. New trajectories lie a band above returning ones, and
# within a band the trainer's order decides.
_NEW_BAND = 1 << 48


class Verdict(enum.Enum):
    ADMIT = "admit"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the node knows of its engine at the moment of the decision. Tokens are KV tokens."""

    in_engine: int  # requests submitted and not finished
    live_tokens: int  # of those requests, as they stand
    parked_tokens: int  # prefixes that would be reused when their trajectory returns
    capacity_tokens: int  # of the KV cache; 0: unknown


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """`busy_requests`: requests from which the engine counts as busy."""

    busy_requests: int = 32
    max_trajectories: int = 1024

    def admit_new(self, view: EngineView, prompt_tokens: int, turn_tokens: int) -> Verdict:
        """Whether a new trajectory of `prompt_tokens` may start, whose first turn samples up to `turn_tokens`."""
        if view.in_engine < self.busy_requests or not view.capacity_tokens:
            return Verdict.ADMIT
        if not view.parked_tokens:
            return Verdict.ADMIT  # nothing would be evicted that anybody comes back for
        needed = view.live_tokens + view.parked_tokens + prompt_tokens + turn_tokens
        return Verdict.ADMIT if needed <= view.capacity_tokens else Verdict.HOLD

    def has_room(self, open_trajectories: int) -> bool:
        return open_trajectories < self.max_trajectories

    def retry_after_s(self, open_trajectories: int, base_s: float) -> float:
        """Pushback of a rejection; grows with how far the node is beyond its bound."""
        return base_s * max(1.0, open_trajectories / self.max_trajectories)

    @staticmethod
    def priority(order: int, *, returning: bool) -> int:
        """The engine's priority, lower first: returning before new, then the trainer's order."""
        bounded = max(-_NEW_BAND // 4, min(order, _NEW_BAND // 4))
        return bounded if returning else bounded + _NEW_BAND
