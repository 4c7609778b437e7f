"""The index of cached pages by prefix. It holds keys and page numbers, no tensors.

A page's key is a chained sha256 over all inputs of its content. The inputs are the profile of this
page and its predecessors, the request's salt, and every token up to its end. Pages with
equal keys hold equal keys and values. Another profile or another salt never gives the same key.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

from ropewalk.rope import Profile

Key = bytes


def root_key(profile: Profile, cache_salt: str) -> Key:
    """Return the key before the first page."""
    digest = hashlib.sha256()
    for part in (repr(profile), cache_salt):
        # surrogatepass: a salt may be any string, and different salts must stay different.
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<q", len(encoded)) + encoded)
    return digest.digest()


def moved_key(previous: Key, profile: Profile, cache_salt: str) -> Key:
    """Return the key from which on pages are computed under another profile."""
    return hashlib.sha256(previous + root_key(profile, cache_salt)).digest()


def next_key(previous: Key, token_ids: Sequence[int]) -> Key:
    """Return the key of a full page after the page (or root) with key `previous`."""
    return hashlib.sha256(previous + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


def extend_keys(
    keys: list[Key],
    token_ids: Sequence[int],
    num_pages: int,
    page_size: int,
    *,
    profile: Profile,
    cache_salt: str,
) -> None:
    """Append the keys of further full pages, up to `num_pages`; the first entry is the root's.

    A position method reads its first tokens natively. Their pages have native keys, so that
    requests with and without a method share them.
    """
    num_native_pages = profile.num_native // page_size
    if not keys:
        keys.append(root_key(profile.native if num_native_pages else profile, cache_salt))
    while len(keys) <= num_pages:
        at = len(keys) - 1
        page = token_ids[at * page_size : (at + 1) * page_size]
        assert len(page) == page_size, "a key for a page that is not full"
        previous = keys[-1]
        if at == num_native_pages > 0:
            previous = moved_key(previous, profile, cache_salt)
        keys.append(next_key(previous, page))


class PrefixIndex:
    """The mapping of key to page, and back. The page pool keeps the ref counts."""

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Return the pages of the longest known prefix of `keys`."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, page: int, key: Key) -> None:
        """Add a page under its key; no effect if another page already has the key."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def holds(self, page: int) -> bool:
        return page in self._key_of

    def forget(self, page: int) -> None:
        """Remove a page before its content changes."""
        del self._page_of[self._key_of.pop(page)]

    def clear(self) -> None:
        self._page_of.clear()
        self._key_of.clear()

    def published(self) -> dict[Key, int]:
        """Return a copy of the index, for tests."""
        return dict(self._page_of)

    def check_integrity(self) -> None:
        """Check that both directions agree. Raises AssertionError."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of
