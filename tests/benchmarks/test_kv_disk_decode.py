"""Intervals of medians in the comparison of decoding with and without pages on disk."""

import pytest

from benchmarks.kv_disk_decode import interval_rank


# Source: tables of the sign test; of ten values, the second and the ninth hold the median.
@pytest.mark.parametrize(("num", "rank"), [(6, 0), (8, 0), (9, 1), (10, 1), (12, 2), (20, 5)])
def test_an_interval_has_the_ranks_of_the_sign_test(num: int, rank: int) -> None:
    """Places count from zero."""
    assert interval_rank(num) == rank
