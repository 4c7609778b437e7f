"""Ticks of logarithmic axes."""

import pytest

from ropewalk.studies.harness.plotting import enclosing_ticks, length_ticks, milliseconds_text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (31.0, 240.0, [20, 50, 100, 200, 500]),
        (52.0, 98.0, [50, 70, 100]),
        (0.4, 90_000.0, [0.1, 1, 10, 100, 1000, 10_000, 100_000]),
        (100.0, 1000.0, [100, 200, 500, 1000]),
    ],
)
def test_ticks_are_round_numbers_around_the_data(
    low: float, high: float, expected: list[float]
) -> None:
    """A narrow range has finer ticks, and a very wide one has powers of ten."""
    assert enclosing_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("low", [1e-4, 0.7, 1.0, 9.99, 63.0, 64.0, 1234.5, 9e6])
@pytest.mark.parametrize("ratio", [1.0, 1.001, 1.05, 1.4, 2.0, 10.0, 1e6])
def test_any_range_has_three_to_ten_ticks(low: float, ratio: float) -> None:
    """The first tick is at or below the data, the last at or above it."""
    ticks = enclosing_ticks(low, low * ratio)
    assert 3 <= len(ticks) <= 10
    assert ticks == sorted(ticks)
    assert 0 < ticks[0] <= low
    assert ticks[-1] >= low * ratio * (1 - 1e-12)


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ([64.0, 300.0], [50, 64, 100, 200, 300, 500]),
        ([300.0], [200, 300, 500]),
        ([64.0, 65.0, 66.0], [64, 65, 66]),
    ],
)
def test_few_lengths_have_others_between_them(lens: list[float], expected: list[float]) -> None:
    """Three measured lengths need no other ticks."""
    assert length_ticks(lens) == pytest.approx(expected)


def test_times_are_read_with_their_unit() -> None:
    """Seconds begin at 1,000 ms."""
    texts = [milliseconds_text(each) for each in (0.5, 50.0, 999.0, 1000.0, 1500.0, 2e6)]
    assert texts == ["0.5 ms", "50 ms", "999 ms", "1 s", "1.5 s", "2,000 s"]
