"""Snapshots of a trajectory: deltas out, a merged one back in.

Invariant: a delta builds on what the trainer acknowledged, speaks of whole turns only, and names every call of the turn
that waits for answers; what `restore` makes of the merged deltas goes on exactly where the maker stood.
"""

from __future__ import annotations

from dataclasses import dataclass

from fermata.v1 import rollout_pb2 as pb

from node_runtime.segments import MODEL, Columns, SegmentError
from rollout_node.call import Call
from rollout_node.trajectory import Spec, State, Trajectory


class SnapshotRefused(Exception):
    """The snapshot cannot be resumed on this node; the text says why."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a snapshot's tokens depend on."""

    model_hash: str
    tokenizer_hash: str
    template_hash: str


def take(trajectory: Trajectory, identity: Identity, now: float) -> pb.Snapshot:
    """A delta up to the trajectory's last boundary, and its mark for the acknowledgement to come."""
    book, columns = trajectory.snapshots, trajectory.columns
    _, base_tokens, base_segments = book.acked
    end = trajectory.boundary
    tokens = columns.segments[end - 1].stop if end else 0
    book.seq += 1
    snapshot = pb.Snapshot(
        snapshot_seq=book.seq,
        base_snapshot_seq=book.acked[0],
        base_tokens=base_tokens,
        base_segments=base_segments,
        segments=columns.pack(base_segments, end),
        model_hash=identity.model_hash,
        tokenizer_hash=identity.tokenizer_hash,
        template_hash=identity.template_hash,
        turn=trajectory.turn,
        consecutive_invalid_calls=trajectory.invalid_in_row,
        calls=trajectory.calls_made,
        remaining_ms=max(0, round((trajectory.deadline_at - now) * 1000)),
        total_tokens=tokens,
    )
    if not trajectory.state.over:
        snapshot.pending.extend(call.to_pending(now) for call in trajectory.open_calls)
    book.marks.append((book.seq, tokens, end, tuple(book.answered)))
    book.answered.clear()
    return snapshot


def restore(
    spec: Spec, snapshot: pb.Snapshot, identity: Identity, *, now: float, held_s: float, deadline_s: float
) -> Trajectory:
    """The trajectory a merged snapshot speaks of: parked where calls are pending, else ready for its next turn.

    `deadline_s` bounds it where the snapshot has no remaining time of its own.
    """
    if snapshot.base_segments or snapshot.base_tokens:
        raise SnapshotRefused("the snapshot is a delta: all deltas must be merged before it is resumed")
    for name in ("model_hash", "tokenizer_hash", "template_hash"):
        theirs, ours = getattr(snapshot, name), getattr(identity, name)
        if theirs and theirs != ours:
            raise SnapshotRefused(
                f"the snapshot has {name} {theirs[:16]} and this node {ours[:16]}: they must be equal"
            )
    try:
        columns = Columns.unpack(snapshot.segments)
    except SegmentError as error:
        raise SnapshotRefused(f"the snapshot contradicts itself: {error}") from error
    if len(columns) != snapshot.total_tokens:
        raise SnapshotRefused(f"the snapshot says {snapshot.total_tokens} tokens but holds {len(columns)}")
    if not columns.segments:
        raise SnapshotRefused("the snapshot holds no tokens: start the trajectory instead")
    # One that is just full ends with LENGTH, here as there.
    if len(columns) > spec.bounds.max_context_tokens:
        raise SnapshotRefused(
            f"the snapshot has {len(columns)} tokens and the context at most {spec.bounds.max_context_tokens}: "
            "no turn fits"
        )
    if columns.segments[-1].kind == MODEL and not snapshot.pending:
        raise SnapshotRefused("the snapshot ends with a whole turn and no pending calls: nothing follows it")
    if snapshot.HasField("remaining_ms"):
        deadline_s = min(deadline_s, snapshot.remaining_ms / 1000 - held_s)
    trajectory = Trajectory(spec, now=now, deadline_at=now + deadline_s)
    trajectory.columns = columns
    trajectory.boundary = len(columns.segments)
    trajectory.turn = snapshot.turn
    trajectory.invalid_in_row = snapshot.consecutive_invalid_calls
    trajectory.calls_made = snapshot.calls
    trajectory.open_calls = [
        Call.from_pending(p, now, held_s) for p in sorted(snapshot.pending, key=lambda p: p.ordinal)
    ]
    trajectory.state = State.PARKED if trajectory.open_calls else State.QUEUED
    trajectory.snapshots.acked = (0, len(columns), len(columns.segments))
    # Results the snapshot holds are the trainer's: its stored acknowledgement of our first snapshot releases them.
    trajectory.snapshots.answered.extend(c.key for c in trajectory.open_calls if c.result is not None)
    return trajectory
