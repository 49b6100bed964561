"""What becomes of a call that the ledger holds as running and that no gateway drives. Pure: answers in, a decision out.

The rule: a call can have started only at the instances that the ledger names for it, each named before it was invoked.
It is joined where it is found. It may start anew at one of those instances, where the same key joins what is still on
its way, or anywhere once each of them has laid a tombstone; all of them must have been asked, be the very instances,
and remember keys for longer than the attempt is old. Else INDETERMINATE.

Invariant: a tool that is not idempotent starts at most once for the key, however young its backends are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fermata.v1 import tool_pb2

from tool_gateway.ledger import AttemptRecord
from tool_gateway.takeover import Answer, Found, Join, NotThere, Start, Undecidable, Unreachable


@dataclass(frozen=True, slots=True)
class StartAnywhere:
    """No instance can have started the call, or ever will."""


RecoveryDecision = Join | Start | StartAnywhere | Undecidable


def open_attempts(attempts: Sequence[AttemptRecord], *, foreign: bool) -> list[AttemptRecord]:
    """The attempts that may have started the call, the last of each instance, oldest first.

    Of a call that is `foreign` a request of another gateway's may still be on its way to an instance that refused ours.
    """
    last = {attempt.instance_id: attempt for attempt in attempts}
    kept = [attempt for attempt in last.values() if foreign or attempt.started != tool_pb2.STARTED_NO]
    return sorted(kept, key=lambda attempt: attempt.number)


def decide(
    attempts: Sequence[AttemptRecord],
    answers: Mapping[str, Answer],
    *,
    spared: str | None,
    join_only: bool,
    margin_s: float,
) -> RecoveryDecision:
    """`attempts` as of ``open_attempts``, `answers` by their instances. `spared`: the one that laid no tombstone."""
    for attempt in attempts:
        if isinstance(answers.get(attempt.instance_id), Found):
            return Join(attempt.instance_id)
    if join_only:
        return Undecidable("the call runs nowhere any more, and it was asked to be joined only")
    for attempt in attempts:
        where = f"the instance {attempt.instance_id} at {attempt.address}"
        match answers.get(attempt.instance_id, Unreachable("it was not asked")):
            case Unreachable(detail):
                return Undecidable(f"the call may have been started by {where}, which cannot be asked: {detail}")
            case NotThere(expired=True):
                return Undecidable(f"the call was run by {where}, which no longer holds its result")
            case NotThere(age_s=age_s, retention_s=retention_s) if age_s + margin_s >= retention_s:
                return Undecidable(
                    f"the call was sent {age_s:.1f} s ago to {where}, which remembers keys for {retention_s:.1f} s: it "
                    "may have run the call and forgotten it"
                )
            case NotThere(tombstoned=tombstoned) if not tombstoned and attempt.instance_id != spared:
                return Undecidable(f"the call may still start at {where}, which laid no tombstone for it")
    for attempt in attempts:
        if attempt.instance_id == spared:
            return Start(attempt.address, attempt.instance_id)
    return StartAnywhere()
