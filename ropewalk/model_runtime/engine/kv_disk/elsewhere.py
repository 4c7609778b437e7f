"""Tokens that a cache without prefixes would have found, and a cache of prefixes cannot.

They are those of windows of one page's tokens that an earlier prompt had at another place, or
behind other tokens, such as documents in another order. Nothing uses them. Their number tells
whether a cache of documents at any offset would be worth building.

Some windows are known, chosen by their content, so the same text chooses the same windows wherever
it stands. They overlap, and each token is in eight of them on average, so nearly all count. Windows
are known by hashes only, in tables whose newer entries replace older ones.

Source: Schleimer, Wilkerson and Aiken, "Winnowing: Local Algorithms for Document Fingerprinting",
2003, with windows chosen as hashes that are 0 modulo a number.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_OVERLAP = 8  # known windows that a token is in, on average
_NUM_WINDOWS = 1 << 19  # known; of four million tokens, with pages of 64
_NUM_PAGES = 1 << 16  # whose prefixes are known; of as many tokens
_FACTOR = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_INVERSE = pow(_FACTOR, -1, 1 << 64)

_Hashes = NDArray[np.uint64]


class Elsewhere:
    """Counts tokens by hashes of earlier prompts, in bounded memory."""

    def __init__(self, page_size: int) -> None:
        """Know nothing yet. A window has the tokens of a page."""
        self._page_size = page_size
        self._each = np.uint64(max(1, page_size // _OVERLAP))
        self._windows = np.zeros(_NUM_WINDOWS, np.uint64)
        self._pages = np.zeros(_NUM_PAGES, np.uint64)

    def note(
        self, domain: bytes, token_ids: Sequence[int], keys: Sequence[bytes], num_found: int
    ) -> int:
        """Take a prompt; return how many of its tokens only a cache without prefixes would find.

        `domain`: prompts of another one share nothing. `keys` are those of its full pages that
        could be reused, and `num_found` tokens were. Tokens of a prefix that an earlier prompt had,
        too, do not count, though its pages may have been evicted.
        """
        if not keys:
            return 0
        page_size = self._page_size
        num_known = self._note_pages(keys) * page_size
        begin = max(0, num_known - page_size + 1)  # of the first window that is not known
        end = len(keys) * page_size
        if num_known == end:
            return 0
        hashes = _window_hashes(token_ids[begin:end], page_size, domain)
        chosen = np.flatnonzero(hashes % self._each == 0)
        values = hashes[chosen]
        places = (values >> np.uint64(32)) % np.uint64(_NUM_WINDOWS)
        is_found = self._windows[places] == values
        self._windows[places] = values
        first = max(num_known, num_found) - begin
        return _num_covered(chosen[is_found], page_size, first, end - begin)

    def _note_pages(self, keys: Sequence[bytes]) -> int:
        """Take the keys of a prefix; return how many of its first pages were known.

        A key hashes those before it, so they were known even if their places were taken since.
        """
        hashes = np.frombuffer(b"".join(key[:8] for key in keys), "<u8").astype(np.uint64)
        places = hashes % np.uint64(_NUM_PAGES)
        is_known = self._pages[places] == hashes
        self._pages[places] = hashes
        return int(np.flatnonzero(is_known)[-1]) + 1 if is_known.any() else 0


def _window_hashes(token_ids: Sequence[int], length: int, domain: bytes) -> _Hashes:
    """Return a hash of each window of so many tokens, by the place of its first token.

    The sum of mixed tokens times powers of a number, as in Rabin's and Karp's search.
    """
    tokens = _mixed(np.asarray(token_ids, np.uint64))
    falling, rising = (_powers(each, len(tokens)) for each in (_INVERSE, _FACTOR))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(tokens * falling, dtype=np.uint64)))
    windows = (sums[length:] - sums[:-length]) * rising[: len(tokens) - length + 1]
    return _mixed(windows ^ np.frombuffer(domain[:8], "<u8").astype(np.uint64))


def _powers(base: int, num: int) -> _Hashes:
    powers = np.full(num, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _mixed(values: _Hashes) -> _Hashes:
    """Spread each number over all bits.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    values = values + np.uint64(_FACTOR)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _num_covered(begins: NDArray[np.intp], length: int, first: int, end: int) -> int:
    """Return how many places from `first` to before `end` lie in windows that begin there."""
    changes = np.zeros(end + length + 1, np.int64)
    np.add.at(changes, begins, 1)
    np.add.at(changes, begins + length, -1)
    return int(np.count_nonzero(np.cumsum(changes)[first:end]))
