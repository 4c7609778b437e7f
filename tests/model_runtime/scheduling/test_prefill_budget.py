"""The size of prefill chunks against measured steps."""

import pytest

from ropewalk.model_runtime.scheduling.prefill_budget import PrefillBudget


def settled(
    pacing: PrefillBudget, seconds_a_token: float, fixed_s: float, steps: int = 40
) -> float:
    """Seconds of a step beside one decode, after many of a machine of that speed."""
    for _ in range(steps):
        seconds = fixed_s + seconds_a_token * pacing.num_tokens(1)
        pacing.note(pacing.num_tokens(1), seconds)
    return fixed_s + seconds_a_token * pacing.num_tokens(1)


@pytest.mark.parametrize("seconds_a_token", [1e-4, 4e-4, 1e-3])
def test_steps_come_to_take_what_they_should(seconds_a_token: float) -> None:
    """Steps come within a factor of 1.4, for any cost of a token and any fixed cost."""
    assert 0.07 < settled(PrefillBudget(0.1, 2048), seconds_a_token, 0.01) < 0.145


@pytest.mark.parametrize("num_decodes", [0, 1, 5, 16])
@pytest.mark.parametrize("seconds_a_token", [2e-5, 1e-4, 3e-4])
def test_rows_of_a_step_fill_whole_blocks(seconds_a_token: float, num_decodes: int) -> None:
    """The number of rows is a power of two, decodes included."""
    pacing = PrefillBudget(0.1, 2048)
    for _ in range(40):
        num_tokens = pacing.num_tokens(num_decodes)
        pacing.note(num_tokens, 0.005 + seconds_a_token * num_tokens)
    assert (num_tokens + num_decodes) in [2**power for power in range(4, 13)] or num_tokens == 2048


def test_many_decodes_do_not_crowd_a_prompt_out() -> None:
    """If a block's rest is under half of the allowed tokens, then the next block is used."""
    pacing = PrefillBudget(0.1, 2048)
    settled(pacing, 1e-3, 0.0)
    assert pacing.num_tokens(1) // 2 <= pacing.num_tokens(60) < 68 + 60


def test_it_follows_when_tokens_become_dearer() -> None:
    """A token costs more the longer its prompt is, and the budget follows."""
    pacing = PrefillBudget(0.1, 2048)
    cost = 1e-4
    for _ in range(100):
        seconds = cost * pacing.num_tokens(1)
        assert seconds < 0.2
        pacing.note(pacing.num_tokens(1), seconds)
        cost *= 1.02


def test_chunks_stay_within_limits() -> None:
    """A slow machine still gets tokens, and a fast one at most max_num_batched_tokens."""
    slow, fast = PrefillBudget(0.1, 2048), PrefillBudget(0.1, 2048)
    settled(slow, 1.0, 0.0)
    settled(fast, 1e-9, 0.0)
    assert (slow.num_tokens(1), fast.num_tokens()) == (31, 2048)


def test_one_slow_step_does_not_undo_it() -> None:
    """Another process may have delayed a single slow step."""
    pacing = PrefillBudget(0.1, 2048)
    settled(pacing, 1e-4, 0.0)
    before = pacing.num_tokens()
    pacing.note(before, 60.0)
    assert pacing.num_tokens() >= before // 2


@pytest.mark.parametrize("num_decodes", [0, 8])
@pytest.mark.parametrize("seconds_a_token", [1e-6, 1e-4, 5e-4])
def test_a_step_without_memory_is_tried_with_half(seconds_a_token: float, num_decodes: int) -> None:
    """Half of the failed size is the bound, even if the time would allow more."""
    pacing = PrefillBudget(0.1, 2048)
    settled(pacing, seconds_a_token, 0.0)
    before = pacing.num_tokens(num_decodes)
    pacing.note_failure(before)
    assert before // 3 <= pacing.num_tokens(num_decodes) <= before // 2
    pacing.note_failure(20)
    assert pacing.num_tokens(num_decodes) <= 10


def test_a_step_without_memory_makes_later_ones_smaller() -> None:
    pacing = PrefillBudget(0.1, 2048)
    settled(pacing, 1e-4, 0.0)
    before = pacing.num_tokens(1)
    pacing.note_failure(before)
    pacing.note(0, 0.01)  # ends the bound of the retry
    assert pacing.num_tokens(1) <= before // 2


def test_a_small_step_is_not_rounded_up() -> None:
    """A budget below the smallest block stays as it is."""
    pacing = PrefillBudget(0.1, 64)
    settled(pacing, 0.05, 0.0)
    assert pacing.num_tokens(1) == 2


@pytest.mark.parametrize("seconds_a_token", [1e-4, 1e-3])
def test_steps_are_longer_while_no_answer_would_pause(seconds_a_token: float) -> None:
    """Steps without decodes also set the size of a step beside decodes."""
    pacing = PrefillBudget(0.1, 2048)
    for _ in range(40):
        long = pacing.num_tokens()
        pacing.note(long, 0.01 + seconds_a_token * long)
    seconds = 0.01 + seconds_a_token * long
    assert min(0.28, 0.01 + 2048 * seconds_a_token) <= seconds < 0.57
    assert 0.07 < 0.01 + seconds_a_token * pacing.num_tokens(1) < 0.15


def test_small_steps_say_nothing() -> None:
    """A small step spends most of its time on other things than its tokens."""
    pacing = PrefillBudget(0.1, 2048)
    before = pacing.num_tokens()
    pacing.note(3, 5.0)
    pacing.note(0, 5.0)
    assert pacing.num_tokens() == before


def test_without_a_target_chunks_are_as_large_as_allowed() -> None:
    """Chunks of a constant size make steps comparable."""
    pacing = PrefillBudget(None, 512)
    pacing.note(512, 60.0)
    assert pacing.num_tokens() == 512


def test_without_a_target_a_step_without_memory_is_forgotten_by_the_next() -> None:
    """The step is tried with half, and the one after it has the full size again."""
    pacing = PrefillBudget(None, 512)
    pacing.note_failure(512)
    assert pacing.num_tokens() == 256
    pacing.note(256, 60.0)
    assert pacing.num_tokens() == 512


def test_decodes_without_memory_do_not_stop_prompts() -> None:
    """A step without prompt tokens says nothing about the time of a prefill."""
    pacing = PrefillBudget(0.1, 2048)
    settled(pacing, 1e-4, 0.0)
    before = pacing.num_tokens(1)
    pacing.note_failure(0)
    pacing.note(0, 0.01)
    assert pacing.num_tokens(1) >= before // 3


def beside(pacing: PrefillBudget, num_decodes: int, row_s: float, fixed_s: float) -> float:
    """Seconds of a step with prefill beside decodes, after many; and all steps are measured."""
    for _ in range(40):
        pacing.note(0, fixed_s + row_s * num_decodes, num_decodes)
        num_tokens = pacing.num_tokens(num_decodes)
        pacing.note(num_tokens, fixed_s + row_s * (num_tokens + num_decodes), num_decodes)
    return fixed_s + row_s * (pacing.num_tokens(num_decodes) + num_decodes)


@pytest.mark.parametrize("num_decodes", [1, 8, 24])
@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_a_slow_model_may_pause_for_four_of_its_decode_steps(
    num_decodes: int, scale: float
) -> None:
    """The bound is four steps without prefill, within the factor of a power of two."""
    row_s, fixed_s = 0.004 * scale, 0.1 * scale
    decode_s = fixed_s + row_s * num_decodes
    found = beside(PrefillBudget(0.1, 2048, follows_decodes=True), num_decodes, row_s, fixed_s)
    assert 4 / 1.45 < found / decode_s < 4 * 1.45


@pytest.mark.parametrize("num_decodes", [1, 8])
def test_a_fast_model_keeps_its_target(num_decodes: int) -> None:
    """Four decode steps are shorter than the target, so all sizes are those without them."""
    follows, stated = PrefillBudget(0.1, 2048, follows_decodes=True), PrefillBudget(0.1, 2048)
    found = [beside(each, num_decodes, 2e-4, 0.005) for each in (follows, stated)]
    assert found[0] == found[1]


def test_before_a_decode_step_was_measured_the_target_holds() -> None:
    """Steps with prefill alone say nothing about decodes."""
    follows, stated = PrefillBudget(0.1, 2048, follows_decodes=True), PrefillBudget(0.1, 2048)
    assert settled(follows, 1e-3, 0.2) == settled(stated, 1e-3, 0.2)


@pytest.mark.parametrize("seconds", [0.2, 1.0, 5.0])
def test_a_lone_prompt_gets_no_fewer_tokens_than_beside_a_decode(seconds: float) -> None:
    """Without decodes, no answer pauses, so a chunk is at least as long as one beside them."""
    pacing = PrefillBudget(0.1, 2048, follows_decodes=True)
    beside(pacing, 1, 0.04 * seconds, seconds)
    assert pacing.num_tokens(1) <= pacing.num_tokens(0)


def test_the_first_decode_step_does_not_size_the_pauses() -> None:
    """One-time costs make it long, and four of it would be a pause of many seconds."""
    follows, stated = PrefillBudget(0.1, 2048, follows_decodes=True), PrefillBudget(0.1, 2048)
    for each in (follows, stated):
        settled(each, 1e-3, 0.0)
        each.note(0, 3.0, 1)
    assert follows.num_tokens(1) == stated.num_tokens(1)
