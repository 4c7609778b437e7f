"""The slots of sequences with states."""

from ropewalk.model_runtime.scheduling.sequence_states import SequenceStates


def test_drafts_of_a_step_share_a_slot_and_leave_one() -> None:
    """A snapshot is worth more than a draft, so the last slot is for that."""
    states = SequenceStates(2, 16)
    for _ in range(2):
        assert states.reserve_draft_slot()
        assert states.pool.num_available == 1
    states.free_draft_slot()
    assert states.pool.num_available == 2
    few = SequenceStates(1, 16)
    assert not few.reserve_draft_slot()
    assert few.pool.num_available == 1
