"""Who waits for weights: looked at when the version changes, and the dead among them do not pile up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node_runtime.segments import Version
from rollout_node.admission import AdmissionPolicy, EngineView
from rollout_node.queueing import ReadyQueue
from rollout_node.trajectory import State

IDLE = EngineView(0, 0, 0, 0)


class Waiting:
    """As much of a trajectory as the queue looks at; counts how often it is looked at."""

    def __init__(self, order: int, wanted: int) -> None:
        self.state, self.returning, self.columns = State.QUEUED, False, ()
        self.spec = SimpleNamespace(order=order, min_version=Version("a", wanted))

    def max_tokens(self) -> int:
        return 8


@pytest.fixture
def looks() -> list[Any]:
    return []


@pytest.fixture
def queue(looks: list[Any]) -> ReadyQueue:
    def alive(trajectory: Any) -> bool:
        looks.append(trajectory)
        return trajectory.state is State.QUEUED

    return ReadyQueue(AdmissionPolicy(), alive)


def pop(queue: ReadyQueue, number: int) -> list[int]:
    return [t.spec.order for t in queue.pop_all(Version("a", number), lambda: IDLE)]


def push(queue: ReadyQueue, trajectory: Any) -> None:
    queue.push(trajectory)


def test_those_who_wait_go_in_by_order_with_the_version_they_asked_for(queue: ReadyQueue) -> None:
    for order, wanted in ((3, 2), (1, 2), (2, 3), (4, 1)):
        push(queue, Waiting(order, wanted))
    assert pop(queue, 1) == [4]
    assert pop(queue, 1) == []
    assert pop(queue, 2) == [1, 3]
    assert queue.waits_for_version
    assert pop(queue, 5) == [2]
    assert not queue.waits_for_version


def test_while_the_version_stays_nobody_is_looked_at_again(queue: ReadyQueue, looks: list[Any]) -> None:
    for order in range(100):
        push(queue, Waiting(order, 2))
    assert pop(queue, 1) == []
    looks.clear()
    for _ in range(50):
        assert pop(queue, 1) == []
    assert not looks
    # A new one that may go in does, all the same.
    push(queue, Waiting(500, 1))
    assert pop(queue, 1) == [500]
    assert pop(queue, 2) == list(range(100))


def test_the_dead_do_not_pile_up_while_a_version_is_waited_for(queue: ReadyQueue) -> None:
    for order in range(5000):
        waiting = Waiting(order, 2)
        push(queue, waiting)
        assert pop(queue, 1) == []
        waiting.state = State.FAILED
    assert len(queue._for_version) < 1000
