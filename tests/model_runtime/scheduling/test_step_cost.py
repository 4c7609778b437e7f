"""The seconds of decode steps by their rows."""

import pytest

from ropewalk.model_runtime.scheduling.step_cost import StepCost


def test_the_line_is_that_of_the_measured_steps() -> None:
    """Steps of a machine that takes 5 ms, and 0.4 ms for each row."""
    cost = StepCost()
    for step in range(200):
        num_rows = 1 + step * 7 % 32
        cost.note(num_rows, 0.005 + 0.0004 * num_rows)
    for num_rows in (1, 16, 64):
        seconds, slope = cost.line(num_rows)
        assert seconds == pytest.approx(0.005 + 0.0004 * num_rows, rel=0.02)
        assert slope == pytest.approx(0.0004, rel=0.02)
    cost.note(1, 60.0)
    assert cost.line(2)[0] < 0.02, "one step of another kind hardly moves it"


def test_steps_of_one_size_have_the_first_slope() -> None:
    """They say nothing about another row, so it takes 6 percent of a step."""
    cost = StepCost()
    for _ in range(20):
        cost.note(8, 0.01)
    assert cost.line(8) == (pytest.approx(0.01), pytest.approx(0.0006))
    assert cost.line(9)[0] == pytest.approx(0.0106)
