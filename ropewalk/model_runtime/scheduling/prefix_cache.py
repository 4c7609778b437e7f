"""The index of cached pages by prefix. It holds keys and page numbers, no tensors.

A page's key is a chained sha256 over all inputs of its content. The inputs are the profile of this
page and its predecessors, the request's salt, and every token up to its end. Pages with
equal keys hold equal keys and values. Another profile or another salt never gives the same key.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from ropewalk.rope import Profile, Tier

Key = bytes
KEY_BYTES = 32  # of a page of the first group, and of every page in a store


@lru_cache(maxsize=256)
def canonical(profile: Profile) -> bytes:
    """Return a profile as bytes that no later release may change: keys outlive the process.

    JSON with sorted names. Every number is a float in hex, because 4 and 4.0 are equal. What is
    None is left out, so a later release may add a field.
    """
    scaling, positions = profile.scaling, profile.positions
    parts = {
        "scaling": {"rope_type": scaling.rope_type, **_fields(scaling)},
        "logn_len": profile.logn_len,
        "positions": positions and {"method": positions.method, **_fields(positions)},
    }
    return json.dumps(_exact(parts), sort_keys=True, separators=(",", ":")).encode()


def _fields(part: Any) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in fields(part)}


def _exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _exact(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_exact(each) for each in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value).hex() if is_number else value


def root_key(profile: Profile, cache_salt: str) -> Key:
    """Return the key before the first page."""
    digest = hashlib.sha256()
    # surrogatepass: a salt may be any string, and different salts must stay different.
    for encoded in (canonical(profile), cache_salt.encode("utf-8", "surrogatepass")):
        digest.update(struct.pack("<q", len(encoded)) + encoded)
    return digest.digest()


def moved_key(previous: Key, profile: Profile, cache_salt: str, offset: int = 0) -> Key:
    """Return the key from which on pages are computed under another profile.

    `offset`: the tokens of the next page that still have the profile before.
    """
    inside = struct.pack("<q", offset) if offset else b""
    return hashlib.sha256(previous + root_key(profile, cache_salt) + inside).digest()


def next_key(previous: Key, token_ids: Sequence[int]) -> Key:
    """Return the key of a full page after the page (or root) with key `previous`."""
    return hashlib.sha256(previous + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


def extend_text_keys(
    keys: list[Key], token_ids: Sequence[int], num_pages: int, page_size: int, cache_salt: str
) -> None:
    """Append keys of further full pages by salt and tokens alone; the first one is the root's.

    Pages with equal keys of this kind hold the same tokens, under any tables.
    """
    if not keys:
        keys.append(hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest())
    for at in range(len(keys) - 1, num_pages):
        keys.append(next_key(keys[-1], token_ids[at * page_size : (at + 1) * page_size]))


def extend_keys(
    keys: list[Key],
    token_ids: Sequence[int],
    num_pages: int,
    page_size: int,
    *,
    tiers: Sequence[Tier],
    cache_salt: str,
) -> None:
    """Append the keys of further full pages, up to `num_pages`; the first entry is the root's.

    `tiers`: those of the positions, ascending; the last one has no end here. A position method
    reads its first tokens natively. Their pages have native keys, so that requests with and without
    a method share them.
    """
    if not keys:
        keys.append(root_key(_profile_at(tiers, 0, page_size), cache_salt))
    # With one tier, no other page begins another profile.
    only = tiers[0].profile.num_native // page_size if len(tiers) == 1 else None
    while len(keys) <= num_pages:
        at = len(keys) - 1
        page = token_ids[at * page_size : (at + 1) * page_size]
        assert len(page) == page_size, "a key for a page that is not full"
        previous = keys[-1]
        for position in _moves(tiers, at, page_size) if only in {None, at} else ():
            profile = _profile_at(tiers, position, page_size)
            previous = moved_key(previous, profile, cache_salt, position - at * page_size)
        keys.append(next_key(previous, page))


def num_sharable(tiers: Sequence[Tier], num_tokens: int) -> int:
    """Return the number of leading positions, under these tiers, whose pages may be shared.

    Pages beyond the first tokens of `sinks` are released, so they are not shared.
    """
    begin = 0
    for tier in tiers:
        method = tier.profile.positions
        if method is not None and method.kept is not None:
            return min(num_tokens, begin or sum(method.kept))
        begin = tier.ceiling
    return num_tokens


def _moves(tiers: Sequence[Tier], page: int, page_size: int) -> list[int]:
    """Return the positions of a page from which on another profile is in force."""
    first = page * page_size
    ends = {tier.ceiling for tier in tiers[:-1] if first <= tier.ceiling < first + page_size}
    changes = sorted(ends | {first})
    return [
        each
        for each in changes
        if each > 0
        and _profile_at(tiers, each, page_size) != _profile_at(tiers, each - 1, page_size)
    ]


def _profile_at(tiers: Sequence[Tier], position: int, page_size: int) -> Profile:
    """Return the profile of a position's states."""
    profile = next((each.profile for each in tiers[:-1] if position < each.ceiling), None)
    profile = tiers[-1].profile if profile is None else profile
    num_native_pages = profile.num_native // page_size
    return profile.native if position < num_native_pages * page_size else profile


def first_page_read(num_tokens: int, window: int | None, page_size: int) -> int:
    """Return the first page that the query after `num_tokens` tokens reads."""
    return 0 if window is None else max(0, (num_tokens + 1 - window) // page_size)


def group_key(key: Key, group: int) -> Key:
    """Return the key of a group's page; that of the first group is the key itself."""
    return key + bytes((group,)) if group else key


def group_of(key: Key) -> int:
    """Return the group whose page has a key that `group_key` made."""
    return key[KEY_BYTES] if len(key) > KEY_BYTES else 0


class PrefixIndex:
    """The mapping of key to page, and back. The page pool keeps the ref counts."""

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._text_of: dict[int, Key] = {}  # of pages that were published with it
        self._num_with: Counter[Key] = Counter()  # pages by the key of their text

    def match(self, keys: Iterable[Key]) -> list[int]:
        """Return the pages of the longest known prefix of `keys`."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def match_groups(
        self, keys: Sequence[Key], windows: Sequence[int | None], page_size: int, hole: int
    ) -> list[int]:
        """Return the pages of the longest prefix of `keys` that a sequence can go on from.

        A group without a window needs its page of every key, and a group with one those that the
        next query reads. The pages stand group beside group, with `hole` for those not needed.
        """
        num_found = len(keys)
        for group, window in enumerate(windows):
            if window is None:
                num_found = self._num_known(keys[:num_found], group)
        num_before = -1
        while num_found != num_before:
            num_before = num_found
            for group, window in enumerate(windows):
                if window is not None:
                    num_found = self._num_with_window(keys, group, num_found, window, page_size)
        pages = [hole] * (num_found * len(windows))
        for group, window in enumerate(windows):
            for at in range(first_page_read(num_found * page_size, window, page_size), num_found):
                pages[at * len(windows) + group] = self._page_of[group_key(keys[at], group)]
        return pages

    def _num_known(self, keys: Sequence[Key], group: int) -> int:
        """Return the number of first keys whose pages of a group are known."""
        for at, key in enumerate(keys):
            if group_key(key, group) not in self._page_of:
                return at
        return len(keys)

    def _num_with_window(
        self, keys: Sequence[Key], group: int, most: int, window: int, page_size: int
    ) -> int:
        """Return the largest number of pages, up to `most`, before which a group has its window."""
        at = most - 1
        while at >= first_page_read(most * page_size, window, page_size):
            if group_key(keys[at], group) not in self._page_of:
                most = at
            at -= 1
        return most

    def page_of(self, key: Key) -> int | None:
        return self._page_of.get(key)

    def has_text(self, text_key: Key) -> bool:
        """Return whether a page holds the text of `extend_text_keys`, under any tables."""
        return text_key in self._num_with

    def publish(self, page: int, key: Key, text_key: Key | None = None) -> None:
        """Add a page under its key; no effect if another page already has the key.

        `text_key`: that of `extend_text_keys`, if it is known.
        """
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key
            if text_key is not None:
                self._text_of[page] = text_key
                self._num_with[text_key] += 1

    def holds(self, page: int) -> bool:
        return page in self._key_of

    def forget(self, page: int) -> None:
        """Remove a page before its content changes."""
        del self._page_of[self._key_of.pop(page)]
        text_key = self._text_of.pop(page, None)
        if text_key is not None:
            self._num_with[text_key] -= 1
            if not self._num_with[text_key]:
                del self._num_with[text_key]

    def clear(self) -> None:
        for entries in (self._page_of, self._key_of, self._text_of, self._num_with):
            entries.clear()

    def published(self) -> dict[Key, int]:
        """Return a copy of the index, for tests."""
        return dict(self._page_of)

    def check_integrity(self) -> None:
        """Check that both directions agree. Raises AssertionError."""
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert self._text_of.keys() <= self._key_of.keys()
        assert Counter(self._text_of.values()) == self._num_with
