"""What a look-up changes in a pool, for any answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tool_gateway.backends.membership import changes

addresses = st.integers(0, 9).map(lambda n: f"10.0.0.{n}:7020")


def test_new_ones_join_in_order_and_missing_ones_leave() -> None:
    found = changes(["a", "b"], ["d", "b", "c", "d"], elsewhere=(), most=9)
    assert (found.join, found.leave, found.elsewhere, found.left_out) == (("c", "d"), ("a",), (), 0)


def test_of_too_many_the_ones_there_are_stay() -> None:
    found = changes(["z"], ["a", "b", "c", "z"], elsewhere=(), most=2)
    assert (found.join, found.leave, found.left_out) == (("a",), (), 2)
    found = changes(["z"], ["a", "b", "c"], elsewhere=(), most=2)
    assert (found.join, found.leave, found.left_out) == (("a", "b"), ("z",), 1)


def test_what_another_pool_has_is_left_out() -> None:
    found = changes(["a"], ["a", "b"], elsewhere={"b"}, most=9)
    assert (found.join, found.leave, found.elsewhere) == ((), (), ("b",))


@given(
    answers=st.lists(st.tuples(st.lists(addresses, min_size=1), st.sets(addresses)), min_size=1, max_size=8),
    most=st.integers(1, 5),
)
def test_after_any_answers_the_pool_is_what_the_last_one_allows(
    answers: list[tuple[list[str], set[str]]], most: int
) -> None:
    members: list[str] = []
    for answer, elsewhere in answers:
        elsewhere -= set(members)  # what is ours is nobody else's
        before = list(members)
        found = changes(members, answer, elsewhere=elsewhere, most=most)
        members = [address for address in members if address not in found.leave] + list(found.join)
        ours = set(answer) - elsewhere
        assert len(set(members)) == len(members) <= most
        assert set(members) <= ours
        assert len(members) == min(most, len(ours))
        assert set(before) & ours <= set(members), "who stays is not exchanged for another"
        assert found.left_out == len(ours) - len(members)
        again = changes(members, answer, elsewhere=elsewhere, most=most)
        assert (again.join, again.leave) == ((), ()), "the same answer changes nothing"
