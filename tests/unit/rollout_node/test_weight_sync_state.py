"""Which step of a sync may follow which."""

from __future__ import annotations

import pytest
from fermata.v1 import weights_pb2 as pb

from rollout_node.weights.state import SyncState


def context(number: int, lineage: str = "a", generation: int = 1) -> pb.SyncContext:
    return pb.SyncContext(version=pb.WeightVersion(lineage=lineage, number=number), group_generation=generation)


def start(number: int, lineage: str = "a", generation: int = 1, **fields: object) -> pb.StartRequest:
    return pb.StartRequest(context=context(number, lineage, generation), **fields)  # type: ignore[arg-type]


@pytest.fixture
def joined() -> SyncState:
    state = SyncState()
    assert state.refuse_init(context(1)) is None
    state.joined(context(1))
    return state


def run_to_proof(state: SyncState, number: int) -> None:
    assert state.refuse_start(start(number)) is None
    state.start(start(number))
    assert state.refuse_step("Update", context(number), pb.SYNC_PHASE_STARTED, pb.SYNC_PHASE_UPDATING) is None
    state.updating()
    assert state.refuse_step("Finish", context(number), pb.SYNC_PHASE_UPDATING) is None
    state.proving()
    state.proven()


def test_a_whole_sync_and_the_next(joined: SyncState) -> None:
    run_to_proof(joined, 1)
    assert (joined.phase, joined.served.number) == (pb.SYNC_PHASE_IDLE, 1)
    run_to_proof(joined, 2)
    assert joined.served.number == 2


def test_older_numbers_of_the_lineage_are_refused_and_the_same_may_be_sent_again(joined: SyncState) -> None:
    run_to_proof(joined, 5)
    assert "older than 5" in (joined.refuse_start(start(4)) or "")
    assert joined.refuse_start(start(5)) is None


def test_a_new_lineage_begins_anywhere_but_needs_its_own_group(joined: SyncState) -> None:
    run_to_proof(joined, 5)
    assert "Init first" in (joined.refuse_start(start(1, "b")) or "")
    assert joined.refuse_init(context(1, "b")) is None
    joined.joined(context(1, "b"))
    assert joined.refuse_start(start(1, "b")) is None
    # The trainer that was replaced is no longer listened to.
    assert "Init first" in (joined.refuse_start(start(6, "a")) or "")


def test_generations_only_go_up_within_a_lineage(joined: SyncState) -> None:
    assert "not newer" in (joined.refuse_init(context(1)) or "")
    assert joined.refuse_init(context(1, generation=2)) is None


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (start(1, kind=pb.UPDATE_KIND_DELTA), "UPDATE_KIND_DELTA is not supported"),
        (start(1, kind=pb.UPDATE_KIND_LORA), "UPDATE_KIND_LORA is not supported"),
        (start(1, generation=7), "generation 7 is not the present 1"),
    ],
)
def test_starts_that_do_not_fit(joined: SyncState, request_: pb.StartRequest, words: str) -> None:
    assert words in (joined.refuse_start(request_) or "")
    assert joined.phase == pb.SYNC_PHASE_IDLE


def test_adapters_are_refused_by_name(joined: SyncState) -> None:
    request = start(1)
    request.context.target.adapter_id = "lora-1"
    assert "adapter 'lora-1'" in (joined.refuse_start(request) or "")


def test_steps_out_of_order(joined: SyncState) -> None:
    assert "Start before Init" in (SyncState().refuse_start(start(1)) or "")
    assert "before Start" in (joined.refuse_step("Update", context(1), pb.SYNC_PHASE_STARTED) or "")
    joined.start(start(1))
    assert "Update comes before" in (joined.refuse_step("Finish", context(1), pb.SYNC_PHASE_UPDATING) or "")
    assert "one sync at a time" in (joined.refuse_step("Update", context(2), pb.SYNC_PHASE_STARTED) or "")
    assert "Finish or Abort it first" in (joined.refuse_start(start(2)) or "")
    assert "Abort it first" in (joined.refuse_init(context(2, generation=2)) or "")


def test_given_up_untouched_goes_on_and_touched_does_not(joined: SyncState) -> None:
    run_to_proof(joined, 1)
    joined.start(start(2))
    assert joined.given_up(touched=False)
    assert (joined.phase, joined.served.number) == (pb.SYNC_PHASE_IDLE, 1)
    joined.start(start(2))
    joined.updating()
    assert not joined.given_up(touched=True)
    assert joined.phase == pb.SYNC_PHASE_FAILED
    # Untouched, but what lies there is still the wreck of the one before.
    joined.start(start(3))
    assert not joined.given_up(touched=False)
    run_to_proof(joined, 4)
    assert joined.phase == pb.SYNC_PHASE_IDLE


@pytest.mark.parametrize(("kind", "named"), [(pb.UPDATE_KIND_DELTA, "UPDATE_KIND_DELTA"), (77, "77")])
def test_an_update_kind_that_is_not_served_or_not_known_is_refused_in_a_sentence(
    joined: SyncState, kind: int, named: str
) -> None:
    assert f"update kind {named} is not supported" in (joined.refuse_start(start(1, kind=kind)) or "")
