"""May a gateway without a record start a call that may have been started before? Pure: answers in, a decision out.

The rule (gateway.proto, CallStart.resend): a call joins where it is found. It is started anew only at one instance, and
only once every other instance of the tool's pools has laid a tombstone, every instance asked (the chosen one too) has
been up for longer than the call is old and remembers keys for longer than that, so that neither a predecessor at its
address can have run the call nor itself have forgotten it, and the instance that was last heard of is among them.
Where the addresses are those of a name, others may have been there before and others may come: nothing is started anew.
Else INDETERMINATE.

Invariant: whatever two gateways decide at the same time, a tool that is not idempotent starts at most once for the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suspect:
    """One address that may have run the call. `instance_id` is None while nobody answers there."""

    address: str
    instance_id: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """The key is there, running or finished."""


@dataclass(frozen=True, slots=True)
class NotThere:
    """The key is unknown there. `uptime_s` was read together with the tombstone, `age_s` when the answer came.

    `retention_s`: for how long the instance promises to remember a key.
    """

    instance_id: str
    tombstoned: bool
    uptime_s: float
    age_s: float
    retention_s: float
    expired: bool = False


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No answer, or none that can be relied on."""

    detail: str


Answer = Found | NotThere | Unreachable


@dataclass(frozen=True, slots=True)
class Join:
    address: str


@dataclass(frozen=True, slots=True)
class Start:
    """Invoke at this instance, and at no other one ever."""

    address: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Undecidable:
    """INDETERMINATE, with the sentence that says why."""

    detail: str


TakeoverDecision = Join | Start | Undecidable


def choose(suspects: list[Suspect], last_instance_id: str, preferred: str | None = None) -> str | None:
    """The address where the call may start: of the instance last heard of, else the preferred one, else the first."""
    for suspect in suspects:
        if last_instance_id and suspect.instance_id == last_instance_id:
            return suspect.address
    reachable = [suspect.address for suspect in suspects if suspect.instance_id is not None]
    if preferred in reachable:
        return preferred
    return reachable[0] if reachable else None


def decide(
    suspects: list[Suspect],
    answers: Mapping[str, Answer],
    *,
    chosen: str | None,
    last_instance_id: str,
    join_only: bool,
    margin_s: float,
    complete: bool = True,
) -> TakeoverDecision:
    """`answers` holds one per suspect's address. `complete`: no other address can have had the call, or will."""
    for suspect in suspects:
        if isinstance(answers.get(suspect.address), Found):
            return Join(suspect.address)
    if join_only:
        return Undecidable("no reachable backend knows the call, and it was asked to be joined only")
    if chosen is None:
        return Undecidable("the call may have been started before, and no backend of its tool can be reached")
    instances: set[str] = set()
    for suspect in suspects:
        answer = answers.get(suspect.address, Unreachable("it was not asked"))
        match answer:
            case Unreachable(detail):
                return Undecidable(
                    f"the call may have been started at {suspect.address}, which cannot be asked: {detail}"
                )
            case NotThere(expired=True):
                return Undecidable(f"the call was run at {suspect.address}, which no longer holds its result")
            case NotThere(age_s=age_s, retention_s=retention_s) if age_s + margin_s >= retention_s:
                return Undecidable(
                    f"the call was first sent {age_s:.1f} s ago and the backend at {suspect.address} remembers keys "
                    f"for {retention_s:.1f} s: it may have run the call and forgotten it"
                )
            case NotThere(instance_id=instance_id, tombstoned=tombstoned, uptime_s=uptime_s, age_s=age_s):
                instances.add(instance_id)
                if not tombstoned and suspect.address != chosen:
                    return Undecidable(f"the backend at {suspect.address} laid no tombstone for the call")
                if uptime_s <= age_s + margin_s:
                    return Undecidable(
                        f"the call was first sent {age_s:.1f} s ago and the backend at {suspect.address} is up for "
                        f"{uptime_s:.1f} s: its predecessor may have started the call"
                    )
    if last_instance_id and last_instance_id not in instances:
        return Undecidable(f"the call was last sent to the instance {last_instance_id}, which is gone")
    if not complete:
        return Undecidable(
            "the call may have been started before, and no backend that its pool's name gives now knows it: one that "
            "is not there any more may have run it"
        )
    answer = answers[chosen]
    assert isinstance(answer, NotThere)
    return Start(chosen, answer.instance_id)
