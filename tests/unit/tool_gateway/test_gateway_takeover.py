"""Taking over a call without a record: the rule, and that two gateways never start it at two instances."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tool_gateway.takeover import (
    Answer,
    Found,
    Join,
    NotThere,
    Start,
    Suspect,
    TakeoverDecision,
    Undecidable,
    Unreachable,
    choose,
    decide,
)

A, B, C = Suspect("a", "ia"), Suspect("b", "ib"), Suspect("c", "ic")
DOWN = Suspect("d", None)


def old(
    instance: str,
    *,
    tombstoned: bool = True,
    uptime_s: float = 100.0,
    age_s: float = 1.0,
    retention_s: float = 600.0,
) -> NotThere:
    return NotThere(instance, tombstoned, uptime_s, age_s, retention_s)


def ask(
    suspects: list[Suspect], answers: dict[str, Answer], last: str = "", join_only: bool = False
) -> TakeoverDecision:
    chosen = choose(suspects, last)
    return decide(suspects, answers, chosen=chosen, last_instance_id=last, join_only=join_only, margin_s=0.25)


def test_it_joins_where_it_is_found() -> None:
    answers: dict[str, Answer] = {"a": old("ia"), "b": Found(), "d": Unreachable("down")}
    assert ask([A, B, DOWN], answers) == Join("b")
    assert ask([A, B], answers, join_only=True) == Join("b")


def test_it_starts_at_the_instance_last_heard_of_where_all_others_are_disproved() -> None:
    answers: dict[str, Answer] = {"a": old("ia"), "b": old("ib", tombstoned=False)}
    assert ask([A, B], answers, last="ib") == Start("b", "ib")


def test_it_does_not_start_where_anything_is_in_doubt() -> None:
    fine: dict[str, Answer] = {"a": old("ia", tombstoned=False), "b": old("ib")}
    assert ask([A, B], fine) == Start("a", "ia")
    for answers, said in (
        (fine | {"b": Unreachable("UNAVAILABLE")}, "cannot be asked"),
        (fine | {"b": old("ib", uptime_s=1.2)}, "predecessor may have started"),
        (fine | {"a": old("ia", tombstoned=False, uptime_s=0.5)}, "predecessor may have started"),
        (fine | {"b": old("ib", tombstoned=False)}, "no tombstone"),
        (fine | {"b": old("ib", retention_s=1.1)}, "remembers keys for 1.1 s"),
        (fine | {"b": old("ib", retention_s=0.0)}, "may have run the call and forgotten it"),
        (fine | {"a": old("ia", tombstoned=False, retention_s=1.1)}, "remembers keys for 1.1 s"),
        (fine | {"b": NotThere("ib", False, 100, 1, 600, expired=True)}, "no longer holds its result"),
        ({"a": old("ia", tombstoned=False)}, "was not asked"),
    ):
        decision = ask([A, B], answers)
        assert isinstance(decision, Undecidable)
        assert said in decision.detail
    gone_before = decide(
        [A, B], fine, chosen="a", last_instance_id="ia", join_only=False, margin_s=0.25, complete=False
    )
    assert isinstance(gone_before, Undecidable), "another address may have had it, and this name knows it no more"
    found = decide([A, B], {"b": Found()}, chosen="a", last_instance_id="", join_only=False, margin_s=1, complete=False)
    assert found == Join("b")
    gone = ask([A, B], fine, last="iz")
    assert isinstance(gone, Undecidable)
    assert "iz, which is gone" in gone.detail
    assert isinstance(ask([DOWN], {"d": Unreachable("down")}), Undecidable)
    assert isinstance(ask([A, B], fine, join_only=True), Undecidable)


def test_the_instance_is_chosen_by_the_last_start_then_the_preference() -> None:
    assert choose([A, B, C], "ic", "a") == "c"
    assert choose([A, B, C], "", "b") == "b"
    assert choose([DOWN, B], "", "d") == "b"
    assert choose([DOWN], "") is None


class _Backend:
    """What one backend does with a key, at its simplest."""

    def __init__(self) -> None:
        self.started = 0
        self.tombstoned = False

    def attach(self, instance: str, tombstone: bool) -> Answer:
        if self.started:
            return Found()
        self.tombstoned |= tombstone
        return NotThere(instance, self.tombstoned, 100.0, 1.0, 600.0)

    def invoke(self) -> bool:
        if not self.started and not self.tombstoned:
            self.started += 1
        return bool(self.started)


@settings(max_examples=300)
@given(data=st.data(), gateways=st.integers(2, 3), before=st.sampled_from([None, "a", "b", "c"]))
def test_gateways_that_take_over_at_once_start_the_call_at_most_once(
    data: st.DataObject, gateways: int, before: str | None
) -> None:
    """Every interleaving of their questions and their invocations, with a predecessor's own late invocation."""
    suspects = [A, B, C]
    backends = {suspect.address: _Backend() for suspect in suspects}
    steps = []
    for _ in range(gateways):
        chosen = data.draw(st.sampled_from(["a", "b", "c"]))
        order = data.draw(st.permutations(suspects))
        steps.append((chosen, list(order), {}))
    late = before
    while any(order is not None for _, order, _ in steps) or late:
        ready = [n for n, (_, order, _) in enumerate(steps) if order is not None] + ([-1] if late else [])
        n = data.draw(st.sampled_from(ready))
        if n == -1:
            assert late is not None
            backends[late].invoke()
            late = None
            continue
        chosen, order, answers = steps[n]
        if order:
            suspect = order.pop()
            answer = backends[suspect.address].attach(suspect.instance_id or "", suspect.address != chosen)
            answers[suspect.address] = answer
            continue
        decision = decide(suspects, answers, chosen=chosen, last_instance_id="", join_only=False, margin_s=0.25)
        if isinstance(decision, Start):
            backends[decision.address].invoke()
        steps[n] = (chosen, None, answers)  # type: ignore[assignment]
    assert sum(backend.started for backend in backends.values()) <= 1
