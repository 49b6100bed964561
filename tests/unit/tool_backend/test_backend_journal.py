"""The journal: at most one start per key, ever, and every bound kept."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tool_backend.journal import Begin, Journal, JournalLimits, Marks, State

A, B = b"a" * 32, b"b" * 32


def make(**limits: float) -> Journal[str, str]:
    return Journal(JournalLimits(**limits))  # type: ignore[arg-type]


def run(journal: Journal[str, str], key: str, now: float, *, idempotent: bool = False, size: int = 10) -> None:
    assert journal.begin(key, A, "owner", now, idempotent=idempotent) is Begin.STARTED
    journal.finish(key, f"result of {key}", size, now)


def test_a_second_request_joins_then_finds_the_result() -> None:
    journal = make()
    assert journal.begin("k", A, "owner", 0.0, idempotent=False) is Begin.STARTED
    assert journal.begin("k", A, "other", 0.0, idempotent=False) is Begin.KNOWN
    found = journal.look_up("k", A, 0.0)
    assert found.state is State.RUNNING
    assert found.entry is not None
    assert found.entry.owner == "owner"
    journal.finish("k", "result", 6, 1.0)
    found = journal.look_up("k", A, 1.0)
    assert found.state is State.DONE
    assert found.entry is not None
    assert found.entry.result == "result"
    assert found.entry.owner is None


def test_other_arguments_conflict_while_running_and_when_done() -> None:
    journal = make()
    journal.begin("k", A, "owner", 0.0, idempotent=False)
    assert journal.look_up("k", B, 0.0).state is State.CONFLICT
    assert journal.begin("k", B, "other", 0.0, idempotent=False) is Begin.KNOWN
    journal.finish("k", "result", 6, 1.0)
    assert journal.look_up("k", B, 1.0).state is State.CONFLICT


def test_a_tombstoned_key_can_never_start() -> None:
    journal = make()
    assert journal.tombstone("k", 0.0)
    assert journal.tombstone("k", 0.0)
    assert journal.begin("k", A, "owner", 1.0, idempotent=True) is Begin.KNOWN
    assert journal.look_up("k", A, 1.0).state is State.TOMBSTONED


def test_a_known_key_takes_no_tombstone() -> None:
    journal = make()
    journal.begin("k", A, "owner", 0.0, idempotent=False)
    assert not journal.tombstone("k", 0.0)
    journal.finish("k", "result", 6, 0.0)
    assert not journal.tombstone("k", 0.0)
    journal.forget_all_results()
    assert not journal.tombstone("k", 0.0)


@pytest.mark.parametrize(("idempotent", "state"), [(False, State.ENDED), (True, State.UNKNOWN)])
def test_after_the_retention_only_the_mark_is_left(idempotent: bool, state: State) -> None:
    journal = make(retention_s=10.0, mark_retention_s=100.0)
    run(journal, "k", 0.0, idempotent=idempotent)
    assert journal.look_up("k", A, 9.9).state is State.DONE
    assert journal.look_up("k", A, 10.0).state is state
    assert journal.entries == 0
    assert journal.used_bytes == 0


def test_memory_pressure_drops_the_oldest_results_and_remembers_their_keys() -> None:
    journal = make(max_bytes=25)
    for number in range(3):
        run(journal, f"k{number}", float(number))
    assert [journal.look_up(f"k{n}", A, 3.0).state for n in range(3)] == [State.ENDED, State.DONE, State.DONE]
    assert journal.begin("k0", A, "owner", 4.0, idempotent=False) is Begin.KNOWN


def test_a_result_larger_than_everything_is_dropped_alone() -> None:
    journal = make(max_bytes=25)
    run(journal, "large", 0.0, size=1000)
    assert journal.look_up("large", A, 0.0).state is State.ENDED


def test_full_of_running_keys_nothing_starts_and_nothing_is_evicted() -> None:
    journal = make(max_entries=2)
    for key in ("a", "b"):
        assert journal.begin(key, A, "owner", 0.0, idempotent=False) is Begin.STARTED
    assert journal.begin("c", A, "owner", 1e9, idempotent=False) is Begin.FULL
    assert journal.look_up("a", A, 1e9).state is State.RUNNING
    journal.finish("a", "result", 6, 1e9)
    assert journal.begin("c", A, "owner", 1e9, idempotent=False) is Begin.STARTED
    assert journal.look_up("a", A, 1e9).state is State.ENDED


def test_marks_are_not_forgotten_before_their_time_new_starts_wait_instead() -> None:
    journal = make(retention_s=10.0, mark_retention_s=100.0, max_entries=1, max_marks=1)
    run(journal, "a", 0.0)
    run(journal, "b", 1.0)  # a is a mark now
    assert journal.begin("c", A, "owner", 2.0, idempotent=False) is Begin.FULL
    assert journal.look_up("a", A, 2.0).state is State.ENDED
    # Ten seconds after a was marked its promise is kept, and it may give way to b.
    assert journal.begin("c", A, "owner", 12.0, idempotent=False) is Begin.STARTED
    assert journal.look_up("a", A, 12.0).state is State.UNKNOWN
    assert journal.look_up("b", A, 12.0).state is State.ENDED


def test_a_tombstone_without_room_is_not_claimed() -> None:
    journal = make(retention_s=10.0, max_marks=1)
    assert journal.tombstone("a", 0.0)
    assert not journal.tombstone("b", 1.0)
    assert journal.look_up("b", A, 1.0).state is State.UNKNOWN


def test_marks_expire() -> None:
    marks = Marks(10, keep_s=5.0, floor_s=1.0)
    assert marks.add("k", 0.0)
    marks.expire(4.9)
    assert marks.has("k")
    marks.expire(5.0)
    assert not marks.has("k")


class JournalMachine(RuleBasedStateMachine):
    """Requests, ends, tombstones and time in any order, in a journal so small that everything is under pressure.

    Times stay within the retention of marks: up to there "at most once" is promised for keys that are not idempotent.
    """

    keys = st.sampled_from([f"k{number}" for number in range(8)])

    @initialize()
    def begin_empty(self) -> None:
        self.limits = JournalLimits(retention_s=20.0, mark_retention_s=1e9, max_entries=3, max_bytes=40, max_marks=1000)
        self.journal: Journal[int, str] = Journal(self.limits)
        self.now = 0.0
        self.starts: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.results: dict[str, str] = {}
        self.tombstoned: set[str] = set()

    @rule(key=keys, digest=st.sampled_from([A, B]))
    def request(self, key: str, digest: bytes) -> None:
        before = self.journal.look_up(key, digest, self.now)
        begun = self.journal.begin(key, digest, len(self.starts), self.now, idempotent=False)
        if begun is Begin.STARTED:
            assert before.state is State.UNKNOWN
            assert key not in self.tombstoned
            self.starts[key] = self.starts.get(key, 0) + 1
            self.running[key] = len(self.starts) - 1
        elif begun is Begin.FULL:
            assert len(self.running) == self.limits.max_entries
        else:
            assert before.state is not State.UNKNOWN

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(0, 60))
    def end(self, data: st.DataObject, size: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[key]
        self.results[key] = f"{key} {self.now}"
        self.journal.finish(key, self.results[key], size, self.now)

    @rule(key=keys)
    def lay_tombstone(self, key: str) -> None:
        if self.journal.tombstone(key, self.now):
            assert key not in self.starts
            self.tombstoned.add(key)

    @rule(seconds=st.floats(0.0, 30.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def press_memory(self) -> None:
        self.journal.forget_all_results()

    @invariant()
    def holds(self) -> None:
        assert all(count == 1 for count in self.starts.values())
        assert not self.tombstoned & set(self.starts)
        assert self.journal.running == len(self.running)
        assert self.journal.entries <= self.limits.max_entries
        assert self.journal.used_bytes <= self.limits.max_bytes + self.journal.entries * 512
        for key in self.running:
            assert self.journal.look_up(key, b"", self.now).state is State.RUNNING
        for key, result in self.results.items():
            found = self.journal.look_up(key, b"", self.now)
            assert found.state in (State.DONE, State.ENDED)
            assert found.state is State.ENDED or (found.entry is not None and found.entry.result == result)
        for key in self.tombstoned:
            assert self.journal.look_up(key, b"", self.now).state is State.TOMBSTONED


JournalMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestJournalMachine = JournalMachine.TestCase
