"""What the books take back is as if it had never been."""

from __future__ import annotations

from typing import Any

from fermata.v1 import tool_pb2
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ledgers import ending, record
from tool_gateway.ledger import AttemptRecord
from tool_gateway.ledger.books import Books
from tool_gateway.ledger.queues import KeyQueue
from tool_gateway.settings import LedgerSettings

SMALL = LedgerSettings(max_entries=3, max_bytes=1 << 16, retention_s=10)
KINDS = ["create", "adopt", "later", "begin", "end", "finish", "ack", "release", "trajectory", "fence", "sweep"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["create", "adopt", "later", "begin", "end", "finish", "ack", "release", "trajectory", "fence", "sweep"]
        ),
        st.integers(0, 5),
        st.sampled_from("tu"),
    ),
    max_size=25,
)


def take(books: Books, step: tuple[str, int, str], now: float) -> Any:
    what, n, trajectory = step
    key = record(n, trajectory=trajectory).key
    match what:
        case "create":
            return books.create(record(n, trajectory=trajectory))
        case "adopt":
            return books.create(record(n, trajectory=trajectory, session="other"))
        case "later":
            return books.create(record(n, trajectory=f"{trajectory}{n}", generation=1 + n % 2))
        case "begin":
            return books.begin_attempt(key, AttemptRecord(1, "i", "a:1", now))
        case "end":
            return books.end_attempt(key, 1, tool_pb2.OUTCOME_NOT_STARTED, tool_pb2.STARTED_NO, "")
        case "finish":
            return books.finish(key, ending("x" * 1000 * n), now)
        case "ack":
            return books.ack("s", [key, record(n + 1, trajectory=trajectory).key])
        case "release":
            return books.release("run", [key])
        case "trajectory":
            return books.release_trajectory("run", trajectory, n)
        case "fence":
            return books.fence("run", f"{trajectory}{n}", n % 3, [key])
        case _:
            return books.sweep(now + n)


def held(books: Books) -> Any:
    """What can be seen from outside, or decides what will be forgotten next."""
    return (
        {key: entry.seen for key, entry in books.calls.items()},
        [(key, mark.state) for key, mark in books.gone.items()],
        [(trajectory, owner.generation) for trajectory, owner in books.owners.items()],
        [books.list_session(session) for session in ("s", "other")],
        books.held_bytes,
    )


@given(before=STEPS, undone=STEPS, after=STEPS)
def test_steps_that_were_undone_leave_no_trace(
    before: list[tuple[str, int, str]], undone: list[tuple[str, int, str]], after: list[tuple[str, int, str]]
) -> None:
    books, twin = Books(SMALL, noting=True), Books(SMALL)
    for now, step in enumerate(before):
        assert take(books, step, now) == take(twin, step, now)
    books.keep()
    for now, step in enumerate(undone, start=len(before)):
        take(books, step, now)
    books.undo()
    assert held(books) == held(twin)
    for now, step in enumerate(after, start=len(before)):
        assert take(books, step, now) == take(twin, step, now)
    assert held(books) == held(twin)


@given(added=st.lists(st.tuples(st.integers(1, 20), st.sampled_from("abcdef")), max_size=40))
def test_the_first_key_is_the_lowest_number_that_still_holds(added: list[tuple[int, str]]) -> None:
    numbers: dict[str, int] = {}
    queue = KeyQueue(numbers.get)
    for number, key in added:
        if number % 5 == 0:
            numbers.pop(key, None)
        else:
            numbers[key] = number
            queue.add(number, key)
        assert queue.first() in ([k for k, n in numbers.items() if n == min(numbers.values())] or [None])


def test_a_queue_does_not_outgrow_what_it_holds() -> None:
    numbers: dict[str, int] = {}
    queue = KeyQueue(numbers.get)
    for number in range(1, 20_000):
        numbers.clear()
        numbers["held"] = 1
        numbers[str(number)] = number
        queue.add(number, str(number))
    assert len(queue._heap) < 3000


def test_the_first_generation_of_a_trajectory_takes_no_room_among_the_owners() -> None:
    books = Books(SMALL)
    books.fence("run", "t", 2, [])
    for n in range(50):
        books.create(record(0, trajectory=f"t{n}"))
        books.finish(record(0, trajectory=f"t{n}").key, ending(), 0.0)
        books.release("run", [record(0, trajectory=f"t{n}").key])
    assert [owner.generation for owner in books.owners.values()] == [2]
