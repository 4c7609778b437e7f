"""Pages are free or used, never both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runtime.page_pool import PagePool


@given(st.lists(st.integers(-5, 6), max_size=60))
def test_any_order_of_allocating_and_freeing_keeps_every_page(steps: list[int]) -> None:
    """positive: allocate; negative: give an earlier allocation back"""
    pool, held = PagePool(20), []
    for step in steps:
        if 0 < step <= pool.num_free:
            held.append(pool.allocate(step))
        elif step < 0 and held:
            pool.free(held.pop(step % len(held)))
        pool.check_integrity()
        pages = [page for each in held for page in each]
        assert len(pages) == len(set(pages)) == pool.num_used


def test_freeing_twice_is_a_bug_that_shows() -> None:
    """not a silent second owner"""
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages)
