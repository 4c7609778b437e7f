"""Pages are free or used, never both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model_runtime.scheduling.page_pool import PagePool
from ropewalk.model_runtime.scheduling.prefix_cache import PrefixIndex, next_key, root_key
from ropewalk.rope import Profile, Unscaled, Yarn


def key(number: int) -> bytes:
    """A key like any other."""
    return number.to_bytes(32, "big")


@given(st.lists(st.integers(-5, 6), max_size=60))
def test_any_order_of_allocating_and_releasing_keeps_every_page(steps: list[int]) -> None:
    """A positive step allocates; a negative one releases an earlier allocation."""
    pool, held = PagePool(20, PrefixIndex()), []
    for step in steps:
        if 0 < step <= pool.num_available:
            held.append(pool.allocate(step))
        elif step < 0 and held:
            pool.release(held.pop(step % len(held)))
        pool.check_integrity()
        pages = [page for each in held for page in each]
        assert len(pages) == len(set(pages)) == pool.num_used


def test_releasing_twice_is_a_bug_that_shows() -> None:
    """An assertion fails, because the pages would otherwise get two owners."""
    pool = PagePool(4, PrefixIndex())
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_published_pages_are_kept_and_evicted_least_recently_used_first() -> None:
    """The last pages of a sequence are evicted first, because a prefix is worth more."""
    index = PrefixIndex()
    pool = PagePool(6, index)
    first, second = pool.allocate(3), pool.allocate(2)
    for number, page in enumerate(first + second):
        index.publish(page, key(number))
    pool.release(first)
    pool.release(second)
    assert (pool.num_used, pool.num_cached, pool.num_available) == (0, 5, 6)
    pool.share(first[:1])  # used again: newest now
    pool.release(first[:1])
    pool.allocate(3)  # one free page, then the two that were used longest ago
    assert index.match([key(0)]) == first[:1]
    assert not index.holds(first[1])
    assert not index.holds(first[2])
    assert index.holds(second[0])
    pool.check_integrity()


def test_a_shared_page_is_used_until_the_last_holder_lets_go() -> None:
    """A shared page is not allocated again before its last holder releases it."""
    index = PrefixIndex()
    pool = PagePool(2, index)
    (page,) = pool.allocate(1)
    index.publish(page, key(1))
    pool.share([page])
    pool.release([page])
    assert pool.num_used == 1
    assert pool.allocate(1) != [page]
    pool.release([page])
    assert pool.is_cached(page)


def test_only_the_same_tokens_profile_and_salt_have_the_same_key() -> None:
    """The keys of pages are chained, so a key also depends on the page before.

    A whole number is the same as an integer and as a float.
    """
    plain, yarn = Profile(Unscaled()), Profile(Yarn(factor=2.0, original_max_position_embeddings=8))
    roots = [
        root_key(plain, ""),
        root_key(plain, "a"),
        root_key(plain, "\ud800"),
        root_key(yarn, ""),
        root_key(Profile(Unscaled(), logn_len=8), ""),
    ]
    keys = [next_key(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [12])]
    keys += [next_key(each, [1, 2]) for each in keys]
    assert len(set(keys) | set(roots)) == len(keys) + len(roots)
    assert next_key(root_key(plain, "a"), [1, 2]) == next_key(root_key(plain, "a"), (1, 2))
    whole = Profile(Yarn(factor=2, original_max_position_embeddings=8))
    assert root_key(whole, "") == root_key(yarn, "")
