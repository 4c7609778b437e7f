"""The pages that a read asks for, in their order. They hold one group of layers each."""

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
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
    places = _pages_read(num_pages, enumerate(windows), page_size)
    return [group_key(keys[at], group) for at, group in places]


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
    limited = [each for each in enumerate(windows) if each[1] is not None]
    for at, group in product(range(num_found, end), whole):
        key = group_key(keys[at], group)
        if key not in known:
            if not (yield key):
                end = at
                break
            known.add(key)
    while end > num_found:
        end_before, end = end, num_found
        for at, group in sorted(_pages_read(end_before, limited, page_size)):
            key = group_key(keys[at], group)
            if key in known:
                continue
            if not (yield key):
                end = at
                break
            known.add(key)


def _pages_read(
    end: int, windows: Iterable[tuple[int, int | None]], page_size: int
) -> Iterator[tuple[int, int]]:
    """Yield what the token after `end` pages reads, group by group: a place and the group each."""
    for group, window in windows:
        for at in range(first_page_read(end * page_size, window, page_size), end):
            yield at, group
