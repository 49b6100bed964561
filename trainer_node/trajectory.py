"""What the trainer holds of one finished trajectory: exact ids, masks, sampling logprobs and version stamps.

Invariant: a trajectory is built from the merged snapshot alone, and nothing here re-tokenises or rounds; the trained
tokens are exactly the tokens sampled (P2).
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

from fermata.v1 import rollout_pb2 as pb

from node_runtime.segments import Columns, SegmentView, Version


def reason_name(reason: int) -> str:
    """`FINISH_REASON_STOP` → `STOP`; a reason that this build does not know keeps its number."""
    if reason in pb.FinishReason.values():
        return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_")  # type: ignore[arg-type]
    return f"REASON_{reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """One trajectory as training needs it. Token columns are aligned with `ids`."""

    trajectory_id: str
    generation: int
    ids: array[int]
    mask: bytearray  # 1 where a token is trained
    logprobs: array[float]  # of the sampler; 0.0 where not sampled
    versions: tuple[tuple[int, int, Version], ...]  # (start, stop, version) over model tokens
    recomputed: bool  # every model token was sampled over KV of its own version
    answer: str
    reason: pb.FinishReason
    turns: int
    calls: tuple[pb.CallSummary, ...]
    generate_us: int
    tool_wait_us: int
    queue_us: int
    segments: tuple[SegmentView, ...] = ()  # who wrote which tokens: the prompt, the model's turns, tools

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)

    @property
    def model_tokens(self) -> int:
        return sum(stop - start for start, stop, _ in self.versions)

    def staleness(self, current: Version) -> int | None:
        """Versions between the oldest model token and `current`; None where a token is of another lineage."""
        oldest = current.number
        for _, _, version in self.versions:
            if version.lineage != current.lineage:
                return None
            oldest = min(oldest, version.number)
        return current.number - oldest

    def made_by(self, version: Version) -> bytearray:
        """One byte a token: 1 where it is trained and was sampled by exactly this version."""
        made = bytearray(len(self.ids))
        for start, stop, stamp in self.versions:
            if stamp.lineage == version.lineage and stamp.number == version.number:
                made[start:stop] = self.mask[start:stop]
        return made

    @classmethod
    def of(cls, finished: pb.RunResponse.Finished, snapshot: pb.Snapshot) -> Trajectory:
        """From the last event and the merged snapshot. Raises SegmentError where the columns contradict themselves."""
        columns = Columns.unpack(snapshot.segments)
        model = [segment for segment in columns.segments if segment.kind == pb.SEGMENT_KIND_MODEL]
        return cls(
            trajectory_id=finished.trajectory_id,
            generation=finished.generation,
            ids=columns.ids,
            mask=columns.loss_mask(),
            logprobs=columns.aligned_logprobs(),
            versions=tuple(columns.version_spans()),
            recomputed=all(segment.kv_mode != pb.KV_MODE_KEPT for segment in model),
            answer=finished.answer.decode("utf-8", "replace"),
            reason=finished.reason,
            turns=len({segment.turn for segment in model}),
            calls=tuple(finished.calls),
            generate_us=finished.generate_us,
            tool_wait_us=finished.tool_wait_us,
            queue_us=finished.queue_us,
            segments=tuple(columns.segments),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory with its reward, ready for its group."""

    trajectory: Trajectory
    reward: float
    task_id: str
    kind: str


@dataclasses.dataclass(slots=True)
class Group:
    """The scored samples of one task."""

    group_id: str
    task_id: str
    kind: str
    samples: list[Sample]
    masked: int = 0  # samples that infrastructure took, whether replaced or not
    position: int = 0  # of its task in the stream of tasks

    @property
    def rewards(self) -> Sequence[float]:
        return [sample.reward for sample in self.samples]


@dataclasses.dataclass(frozen=True, slots=True)
class Consumption:
    """What is left of a group when a step consumes it, and how old it was."""

    kept: list[Sample]
    dropped: int  # older than max_staleness, or of another lineage
    ages: list[int]  # of the kept ones


def consume(samples: Sequence[Sample], current: Version, max_staleness: int) -> Consumption:
    """Check the age of each sample at the moment it is trained on.

    Here and not when its group starts: a trajectory may be held by a tool for any number of versions, so gating starts
    bounds nothing.
    """
    kept, ages, dropped = [], [], 0
    for sample in samples:
        age = sample.trajectory.staleness(current)
        if age is None or age > max_staleness:
            dropped += 1
        else:
            kept.append(sample)
            ages.append(age)
    return Consumption(kept, dropped, ages)
