"""The pages that a read asks for, in their order. They hold one group of layers each."""

import hashlib
from collections.abc import Generator, Iterator, Sequence
from itertools import product

from ropewalk.model_runtime.scheduling.prefix_cache import (
    KEY_BYTES,
    Key,
    first_page_read,
    group_key,
)

Pages = Generator[Key, bool, None]


def stored_key(key: Key) -> Key:
    """Return the key of a page in a store; those of further groups are hashed to its length."""
    return key if len(key) == KEY_BYTES else hashlib.sha256(key).digest()


def pages_before(
    keys: Sequence[Key], num_pages: int, windows: Sequence[int | None], page_size: int
) -> list[Key]:
    """Return the keys of all pages that a sequence needs to go on after its first `num_pages`.

    `keys`: of its first pages. `windows`: keys that each group of layers reads (page_groups.py).
    """
    return [
        group_key(keys[at], group)
        for group, window in enumerate(windows)
        for at in range(first_page_read(num_pages * page_size, window, page_size), num_pages)
    ]


def wanted_pages(
    keys: Sequence[Key],
    num_found: int,
    windows: Sequence[int | None],
    page_size: int,
    known: set[Key],
) -> Pages:
    """Yield the keys of the pages to read, and take whether each was there.

    First come the pages of groups without a window, up to the first that is absent. Then come those
    of the windows before that place, the first ones first. If one of them is absent, then no place
    whose window has it will do, and the read goes on with the windows before it. So it looks once a
    window at most where there is nothing. It ends at `num_found`, where the sequence can go on
    without a read.

    `known`: keys of pages in the cache; those that are read are added.
    """
    end = len(keys)
    whole = [group for group, window in enumerate(windows) if window is None]
    for at, group in product(range(num_found, end), whole):
        key = group_key(keys[at], group)
        if key not in known:
            if not (yield key):
                end = at
                break
            known.add(key)
    while end > num_found:
        end_before, end = end, num_found
        for at, group in _in_windows(end_before, windows, page_size):
            key = group_key(keys[at], group)
            if key in known:
                continue
            if not (yield key):
                end = at
                break
            known.add(key)


def _in_windows(
    end: int, windows: Sequence[int | None], page_size: int
) -> Iterator[tuple[int, int]]:
    """Yield the pages of windows before a place, the first ones first: a place and a group each."""
    firsts = {
        group: first_page_read(end * page_size, window, page_size)
        for group, window in enumerate(windows)
        if window is not None
    }
    for at in range(min(firsts.values(), default=end), end):
        for group, first in firsts.items():
            if at >= first:
                yield at, group
