import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from trainer_node.assignment import Assignment, Entry, Fate

NEVER = 1e9


def entry(name, order=0, tools=(), deadline=NEVER):
    return Entry(name, order, frozenset(tools), deadline)


def welcome(core, address, *, incarnation="one", tools=("calculator",), room=0, serving=True, synced=True):
    core.connected(
        address, node_id=address, incarnation=incarnation, serving=serving, max_trajectories=room, tools=tools
    )
    core.nodes[address].synced = synced


def core(*addresses, max_moves=3):
    made = Assignment(addresses, max_moves=max_moves)
    for address in addresses:
        welcome(made, address)
    return made


def plan(assignment, now=0.0):
    return [(address, given.trajectory_id) for address, given in assignment.plan(now)]


def test_the_least_loaded_node_gets_the_lowest_order():
    made = core("a", "b")
    for order in (3, 1, 2):
        made.add(entry(f"t{order}", order))
    assert plan(made) == [("a", "t1"), ("b", "t2"), ("a", "t3")]
    made.remove("t1")
    made.remove("t3")
    made.add(entry("t4", 4))
    assert plan(made) == [("a", "t4")]


def test_load_is_relative_to_room():
    made = Assignment(["big", "small"], max_moves=1)
    welcome(made, "big", room=4)
    welcome(made, "small", room=1)
    for order in range(7):
        made.add(entry(f"t{order}", order))
    given = [address for address, _ in plan(made)]
    assert sorted(given) == ["big"] * 4 + ["small"]
    assert plan(made) == []
    made.remove("t0")
    assert len(plan(made)) == 1


@pytest.mark.parametrize("state", [{"serving": False}, {"synced": False}])
def test_a_node_that_is_not_ready_gets_nothing(state):
    made = Assignment(["a"], max_moves=1)
    welcome(made, "a", **state)
    made.add(entry("t"))
    assert plan(made) == []


def test_a_draining_node_gets_nothing_new():
    made = core("a")
    made.load("a", serving=True, draining=True)
    made.add(entry("t"))
    assert plan(made) == []


def test_tools_decide_where_a_trajectory_may_go():
    made = Assignment(["a", "b"], max_moves=1)
    welcome(made, "a", tools=["calculator"])
    welcome(made, "b", tools=["calculator", "search"])
    made.add(entry("t1", 1, ["search"]))
    made.add(entry("t2", 2, ["search"]))
    made.add(entry("t3", 3, ["python"]))
    assert plan(made) == [("b", "t1"), ("b", "t2")]


def test_a_lost_node_gives_its_trajectories_up_under_a_new_generation():
    made = core("a", "b")
    made.add(entry("t"))
    assert plan(made) == [("a", "t")]
    assert made.is_current("a", "t", 0)
    assert made.lost("a", 5.0) == (["t"], {})
    assert not made.is_current("a", "t", 0)
    assert plan(made, 5.0) == [("b", "t")]
    assert made.is_current("b", "t", 1)
    assert not made.is_current("b", "t", 0)


def test_moving_ends_somewhere():
    made = core("a", max_moves=2)
    made.add(entry("t"))
    for _ in range(2):
        plan(made)
        assert made.lost("a", 0.0)[0] == ["t"]
        welcome(made, "a")
    plan(made)
    assert made.lost("a", 0.0) == ([], {"t": Fate.NODE_LOST})


def test_another_process_at_the_address_is_fresh_and_unsynced():
    made = core("a")
    assert made.connected("a", node_id="a", incarnation="two", serving=True, max_trajectories=0, tools=())
    assert not made.nodes["a"].synced
    assert not made.connected("a", node_id="a", incarnation="two", serving=True, max_trajectories=0, tools=())


def test_a_rejection_is_retried_after_its_time():
    made = core("a")
    made.add(entry("t"))
    plan(made)
    assert made.rejected("t", retry_after=2.0, now=10.0) is None
    assert plan(made, 11.9) == []
    assert made.next_due(11.9) == 12.0
    assert plan(made, 12.0) == [("a", "t")]


def test_what_waits_for_a_node_does_not_wake_anybody_by_time():
    made = Assignment(["a"], max_moves=1)
    made.add(entry("t"))
    assert made.next_due(1.0) == NEVER


def test_never_right_here_means_another_node_until_none_is_left():
    made = core("a", "b")
    made.add(entry("t"))
    assert plan(made) == [("a", "t")]
    assert made.rejected("t", retry_after=None, now=0.0) is None
    assert plan(made) == [("b", "t")]
    assert made.rejected("t", retry_after=None, now=0.0) is Fate.REJECTED


def test_deadlines_reach_waiting_and_open_ones():
    made = core("a")
    made.add(entry("open", 1, deadline=5.0))
    plan(made)
    made.add(entry("waiting", 2, ["python"], deadline=6.0))
    assert made.expired(4.9) == []
    assert made.expired(6.0) == ["open", "waiting"]
    assert made.next_due(0.0) == 5.0


def test_ids_are_unique():
    made = core("a")
    made.add(entry("t"))
    with pytest.raises(ValueError, match="known already"):
        made.add(entry("t"))


class Machine(RuleBasedStateMachine):
    """Whatever happens, a trajectory is in one place, and its generation never falls nor repeats at two owners."""

    ids = Bundle("ids")

    def __init__(self):
        super().__init__()
        self.core = Assignment(["a", "b", "c"], max_moves=4)
        self.now = 0.0
        self.count = 0
        self.owners = {}
        self.incarnation = 0

    @rule(target=ids)
    def add(self):
        self.count += 1
        name = f"t{self.count}"
        self.core.add(entry(name, self.count, deadline=NEVER))
        return name

    @rule(address=st.sampled_from("abc"), room=st.integers(0, 2), anew=st.booleans())
    def connect(self, address, room, anew):
        if self.core.nodes[address].connected:
            return
        if anew:
            self.incarnation += 1
        known = self.core.nodes[address].incarnation
        welcome(self.core, address, incarnation=f"i{self.incarnation}" if anew else known or "first", room=room)

    @rule(address=st.sampled_from("abc"))
    def lose(self, address):
        _, ended = self.core.lost(address, self.now)
        for name in ended:
            self.core.remove(name)

    @rule()
    def plan(self):
        for address, given in self.core.plan(self.now):
            owner = (given.trajectory_id, given.generation)
            assert owner not in self.owners
            self.owners[owner] = address
            assert self.core.nodes[address].ready

    @rule(name=consumes(ids))
    def finish(self, name):
        self.core.remove(name)

    @rule(name=ids, after=st.none() | st.floats(0, 3))
    def reject(self, name, after):
        known = self.core.entries.get(name)
        if known is None or known.node is None:
            return
        if self.core.rejected(name, retry_after=after, now=self.now) is not None:
            self.core.remove(name)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def one_place_each(self):
        waiting = [name for _, name in self.core._waiting]
        opened = [name for node in self.core.nodes.values() for name in node.open]
        assert sorted(waiting + opened) == sorted(self.core.entries)
        assert self.core._waiting == sorted(self.core._waiting)


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
