"""The size of prefill chunks against measured steps."""

import pytest

from model_runtime.pacing import Pacing


def settled(pacing: Pacing, seconds_a_token: float, fixed_s: float, steps: int = 40) -> float:
    """Seconds of a step after many of a machine of that speed."""
    for _ in range(steps):
        seconds = fixed_s + seconds_a_token * pacing.num_tokens()
        pacing.note(pacing.num_tokens(), seconds)
    return fixed_s + seconds_a_token * pacing.num_tokens()


@pytest.mark.parametrize("seconds_a_token", [1e-4, 4e-4, 1e-3])
def test_steps_come_to_take_what_they_should(seconds_a_token: float) -> None:
    """whatever a token costs, and what a step costs without any"""
    assert settled(Pacing(0.1, 2048), seconds_a_token, 0.01) == pytest.approx(0.1, rel=0.05)


def test_it_follows_when_tokens_become_dearer() -> None:
    """as they do the longer a prompt is"""
    pacing = Pacing(0.1, 2048)
    cost = 1e-4
    for _ in range(100):
        seconds = cost * pacing.num_tokens()
        assert seconds < 0.15
        pacing.note(pacing.num_tokens(), seconds)
        cost *= 1.02


def test_chunks_stay_within_limits() -> None:
    """a slow machine still reads on, and a fast one does not exceed max_num_batched_tokens"""
    slow, fast = Pacing(0.1, 2048), Pacing(0.1, 2048)
    settled(slow, 1.0, 0.0)
    settled(fast, 1e-9, 0.0)
    assert (slow.num_tokens(), fast.num_tokens()) == (32, 2048)


def test_one_slow_step_does_not_undo_it() -> None:
    """something else may have held it up"""
    pacing = Pacing(0.1, 2048)
    settled(pacing, 1e-4, 0.0)
    before = pacing.num_tokens()
    pacing.note(before, 60.0)
    assert pacing.num_tokens() >= before // 2


def test_a_step_without_memory_is_tried_with_half() -> None:
    """and no further at once"""
    pacing = Pacing(0.1, 2048)
    settled(pacing, 1e-4, 0.0)
    before = pacing.num_tokens()
    pacing.note_failure()
    assert pacing.num_tokens() == before // 2


@pytest.mark.parametrize("seconds_a_token", [1e-4, 1e-3])
def test_steps_are_longer_while_no_answer_would_pause(seconds_a_token: float) -> None:
    """and what they take tells how long another would"""
    pacing = Pacing(0.1, 2048)
    for _ in range(40):
        long = pacing.num_tokens(is_answering=False)
        pacing.note(long, 0.01 + seconds_a_token * long)
    seconds = 0.01 + seconds_a_token * long
    assert seconds == pytest.approx(min(0.3, 0.01 + 2048 * seconds_a_token), rel=0.05)
    assert 0.09 < 0.01 + seconds_a_token * pacing.num_tokens() < 0.12


def test_small_steps_say_nothing() -> None:
    """most of what they take is not for their tokens"""
    pacing = Pacing(0.1, 2048)
    before = pacing.num_tokens()
    pacing.note(3, 5.0)
    pacing.note(0, 5.0)
    assert pacing.num_tokens() == before


def test_without_a_target_chunks_are_as_large_as_allowed() -> None:
    """always the same, for whoever compares steps"""
    pacing = Pacing(None, 512)
    pacing.note(512, 60.0)
    assert pacing.num_tokens() == 512
