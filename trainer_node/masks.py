"""How many samples infrastructure took away, from where, and when that is too many.

Pure. Invariant: every sample is counted once, scored or masked with a cause; the share that stops a run is taken over
the last samples, so that one bad minute long ago cannot stop it, nor a good start hide a bad present.
"""

from __future__ import annotations

from collections import Counter, deque

MAX_PROMPTS = 4096
MAX_CAUSES = 64


class MaskTally:
    """Masked samples by cause, by tool and by prompt."""

    def __init__(self, *, share_limit: float, window: int, min_samples: int) -> None:
        self.scored = 0
        self.by_cause: Counter[str] = Counter()
        self.by_tool: Counter[str] = Counter()
        self.by_kind: Counter[str] = Counter()
        self.by_prompt: Counter[str] = Counter()
        self.samples_by_kind: Counter[str] = Counter()
        self.last_reason = ""
        self.reasons: dict[str, str] = {}  # the last of each cause
        self._share_limit = share_limit
        self._min_samples = min_samples
        self._recent: deque[bool] = deque(maxlen=window)

    @property
    def masked(self) -> int:
        return sum(self.by_cause.values())

    @property
    def share(self) -> float:
        """Over the whole run; 0 where nothing was sampled."""
        total = self.scored + self.masked
        return self.masked / total if total else 0.0

    def add_scored(self, kind: str) -> None:
        self.scored += 1
        self.samples_by_kind[kind] += 1
        self._recent.append(False)

    def add_masked(self, *, cause: str, tool: str, task_id: str, kind: str, reason: str) -> None:
        self.by_cause[cause] += 1
        self.by_tool[tool or "none"] += 1
        self.by_kind[kind] += 1
        self.samples_by_kind[kind] += 1
        if task_id in self.by_prompt or len(self.by_prompt) < MAX_PROMPTS:
            self.by_prompt[task_id] += 1
        self.last_reason = reason
        if cause in self.reasons or len(self.reasons) < MAX_CAUSES:
            self.reasons[cause] = reason
        self._recent.append(True)

    def too_many(self) -> str | None:
        """One sentence where the run should stop, else None."""
        if len(self._recent) < self._min_samples:
            return None
        share = sum(self._recent) / len(self._recent)
        if share <= self._share_limit:
            return None
        causes = ", ".join(f"{cause} {count}" for cause, count in self.by_cause.most_common(3))
        tools = ", ".join(f"{tool} {count}" for tool, count in self.by_tool.most_common(3))
        return (
            f"{share:.0%} of the last {len(self._recent)} samples were masked, the limit is {self._share_limit:.0%} "
            f"(causes: {causes}; tools: {tools}; the last: {self.last_reason}): faults that fall on some prompts more "
            "than on others bias what is learnt, so mend them, or raise trainer.masked.share_limit"
        )

    def report(self) -> dict[str, object]:
        """For the summary: per cause, tool, kind of task, and the prompts that were hit most."""
        return {
            "by_cause": dict(self.by_cause),
            "reasons": dict(self.reasons),
            "by_tool": dict(self.by_tool),
            "share_by_kind": {kind: self.by_kind[kind] / total for kind, total in sorted(self.samples_by_kind.items())},
            "prompts": dict(self.by_prompt.most_common(20)),
        }
