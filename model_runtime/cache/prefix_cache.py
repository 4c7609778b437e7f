"""Which cached pages hold which prefix. Keys and numbers only, no tensors.

A page's key is a sha256 chained over everything its content depends on: the profile that computed
it and all its predecessors, the request's salt, and every token up to its end. Equal keys hold
equal keys and values; another profile, or another salt, never has the same key.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

from rope import Profile

Key = bytes


def root_key(profile: Profile, cache_salt: str) -> Key:
    """The key before the first page."""
    digest = hashlib.sha256()
    for part in (repr(profile), cache_salt):
        # surrogatepass: a salt is any string, and two different ones must stay different.
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<q", len(encoded)) + encoded)
    return digest.digest()


def next_key(previous: Key, token_ids: Sequence[int]) -> Key:
    """The key of a full page after the one (or the root) with key `previous`."""
    return hashlib.sha256(previous + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


class PrefixIndex:
    """Key -> page, and back. Which pages are in use is the page pool's business."""

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Pages of the longest run of keys, from the first, that are all known."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, page: int, key: Key) -> None:
        """Let others find a page; harmless where another page has the key already."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def holds(self, page: int) -> bool:
        """Whether a page can be found."""
        return page in self._key_of

    def forget(self, page: int) -> None:
        """Take a page out; its content is about to change."""
        del self._page_of[self._key_of.pop(page)]

    def clear(self) -> None:
        """Forget everything."""
        self._page_of.clear()
        self._key_of.clear()

    def published(self) -> dict[Key, int]:
        """Everything that can be found: for tests."""
        return dict(self._page_of)

    def check_integrity(self) -> None:
        """Both directions agree. Raises AssertionError."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of
