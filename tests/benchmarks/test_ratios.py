"""Medians, ratios and their orientation."""

import pytest

from benchmarks.compare.ratios import Line, Metric, Ratio, ratio, table

RATE = Metric("decode", "tokens/s", higher_is_better=True)
TIME = Metric("wall time", "s", higher_is_better=False)


def test_above_one_always_means_that_a_is_better() -> None:
    """A rate is better if it is higher, and a time is better if it is lower."""
    assert ratio({0: 30}, {0: 20}, RATE) == Ratio(1.5, 1.5, 1.5)
    assert ratio({0: 20}, {0: 30}, TIME) == Ratio(1.5, 1.5, 1.5)
    assert ratio({0: 30}, {0: 20}, TIME) == Ratio(2 / 3, 2 / 3, 2 / 3)


def test_each_round_is_compared_with_itself() -> None:
    """A machine that becomes ten times slower changes both medians but no ratio."""
    a = {0: 10.0, 1: 1.0, 2: 0.1}
    b = {0: 5.0, 1: 0.25, 2: 0.0125}
    assert ratio(a, b, RATE) == Ratio(pytest.approx(4), pytest.approx(2), pytest.approx(8))


def test_a_round_that_one_of_them_lacks_is_left_out() -> None:
    """Without a common round there is no ratio."""
    assert ratio({0: 4, 2: 100}, {0: 2, 1: 100}, RATE) == Ratio(2, 2, 2)
    assert ratio({0: 1}, {1: 1}, RATE) is None


LINES = [
    Line("single", RATE, ({0: 100, 1: 300, 2: 200}, {0: 50, 1: 100, 2: 400})),
    Line("mixed", TIME, ({0: 0.5}, {})),
]


def test_the_table_has_medians_of_rounds_and_the_ratio_with_its_spread() -> None:
    """A dash stands for a number that does not exist."""
    head, single, mixed = table(LINES, ["ours", "theirs"], markdown=False).splitlines()
    assert head.split() == [
        *("scenario", "metric", "ours", "theirs", "ours/theirs", "lowest", "to", "highest"),
        "rounds",
    ]
    assert single.split()[:1] == ["single"]
    assert single.split()[-7:] == ["200", "100", "2.00", "0.50", "to", "3.00", "3"]
    assert mixed.split()[-5:] == ["0.5", "-", "-", "-", "1/0"]
