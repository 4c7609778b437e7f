"""Latencies read back from histograms."""

import math

import pytest

from benchmarks.gpu_server import Counts, latencies, median_of


def test_the_median_lies_between_two_bounds() -> None:
    """The median is interpolated between the counts of the two bounds."""
    assert median_of({0.1: 0, 0.2: 4, 0.4: 8, math.inf: 8}) == pytest.approx(0.2)
    assert median_of({0.1: 1, 0.2: 2, 0.4: 10, math.inf: 10}) == pytest.approx(0.275)
    assert median_of({0.1: 3, math.inf: 3}) == pytest.approx(0.05)
    assert median_of({0.1: 0, 0.5: 1, math.inf: 9}) == 0.5, "the last bucket has no end"


def test_only_what_came_in_between_counts() -> None:
    """Rows come by context bucket, shortest first, without unused buckets."""
    sum_key = -1.0
    before: Counts = {("first_token", "64"): {0.1: 5, 0.2: 5, math.inf: 5, sum_key: 0.25}}
    after: Counts = {
        ("first_token", "+Inf"): {0.1: 0, 0.2: 0, math.inf: 0, sum_key: 0.0},
        ("first_token", "128"): {0.1: 0, 0.2: 1, math.inf: 1, sum_key: 0.15},
        ("first_token", "64"): {0.1: 5, 0.2: 7, math.inf: 7, sum_key: 0.55},
        ("next_token", "128"): {0.1: 2, 0.2: 2, math.inf: 2, sum_key: 0.08},
    }
    rows = list(latencies(before, after))
    assert [row["context_bucket"] for row in rows] == ["64", "128"]
    first, second = rows
    assert (first["first_token_count"], first["next_token_count"]) == (2, 0)
    assert first["first_token_mean_s"] == pytest.approx(0.15)
    assert first["first_token_p50_s"] == pytest.approx(0.15)
    assert first["next_token_mean_s"] is None
    assert (second["first_token_count"], second["next_token_count"]) == (1, 2)
    assert second["next_token_mean_s"] == pytest.approx(0.04)
