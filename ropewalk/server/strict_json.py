"""JSON objects with each name once.

Python silently keeps the last of equal names, which is seldom the one that is meant.
"""

from typing import Any


class TwiceError(ValueError):
    """A name that an object has twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, as json's `object_pairs_hook`. Raises TwiceError."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    raise TwiceError(name)
