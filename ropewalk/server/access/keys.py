"""API keys, their names and bounds, as configured. Only digests of the keys are held."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

UNNAMED = "unnamed"  # the name of all keys that have none of their own
NAME_RULE = "up to 64 letters, digits, points, hyphens and underscores, a letter or digit first"
KEY_RULE = "one or more printable ASCII characters without spaces"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]+")


class KeyLineError(ValueError):
    """A line of the key file that is no key; the message is a part of a sentence."""


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """The bounds of all keys of one name; None: no bound."""

    max_running: int | None = None  # answers that the engine may hold at once
    max_requests_per_minute: int | None = None


NO_BOUNDS = KeyBounds()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key that requests may present."""

    name: str
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys, and the bounds of the names that have some."""

    keys: tuple[ApiKey, ...] = ()
    bounds: Mapping[str, KeyBounds] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key.name for key in self.keys))


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Names whose keys or bounds differ between two tables, in the order of the keys."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


def changes_between(before: KeyTable, after: KeyTable) -> KeyChanges:
    """Return the names that differ; a key that moved to another line has not changed."""
    old, new = _rules_by_name(before), _rules_by_name(after)
    return KeyChanges(
        added=tuple(name for name in new if name not in old),
        changed=tuple(name for name in new if name in old and new[name] != old[name]),
        removed=tuple(name for name in old if name not in new),
    )


def _rules_by_name(table: KeyTable) -> dict[str, tuple[frozenset[bytes], KeyBounds]]:
    """Return the digests of each name's keys, and its bounds."""
    return {
        name: (
            frozenset(key.digest for key in table.keys if key.name == name),
            table.bounds.get(name, NO_BOUNDS),
        )
        for name in table.names
    }


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Return whether a client can send a text as a bearer token, which has no space in it."""
    return _KEY.fullmatch(text) is not None


def named_key(line: str) -> tuple[str, str]:
    """Split a line of the key file, `name:key` or `key`, into name and key.

    Raises KeyLineError, whose message never holds any of the line: all of it may be secret.
    """
    before, colon, after = line.partition(":")
    name, key = (before, after.strip()) if colon else (UNNAMED, line)
    if not is_name(name):
        raise KeyLineError(
            f"the name before the colon must be {NAME_RULE}; a key with a colon needs one, for "
            f"example `{UNNAMED}:KEY`"
        )
    if not key:
        raise KeyLineError("there must be a key after the colon")
    if not is_key(key):
        raise KeyLineError(f"a key must be {KEY_RULE}")
    return name, key


def key_under_two_names(pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return two names that share one key, or None; `pairs` are names and keys."""
    owners: dict[str, str] = {}
    for name, key in pairs:
        owner = owners.setdefault(key, name)
        if owner != name:
            return owner, name
    return None
