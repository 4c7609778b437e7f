"""Depth and number of values of a JSON text, before any object is made of it."""

import mmap
import re

# Strings are skipped whole, so that a bracket inside one does not count.
# Possessive, because the regex engine would otherwise store every character for backtracking.
_PART = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[{]|[\]}]|[^"\[\]{}]++', re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
# Bytes that are looked at in one call of the regex engine, which keeps other threads waiting.
_WINDOW = 65536
_QUOTE, _OPENING, _CLOSING = ord('"'), b"[{", b"]}"


class JsonShape:
    """A count of a text's depth and values, which stops at the first limit that is exceeded.

    Values are those in lists and objects, by their commas and brackets. An empty list or object is
    also counted as what it could hold.
    """

    def __init__(self, max_depth: int, max_values: int) -> None:
        self._max_depth, self._max_values = max_depth, max_values
        self._depth = self._num_values = 0

    def exceeds(self, text: bytes | mmap.mmap, size: int) -> str | None:
        """Return the limit that the first `size` bytes exceed: "depth", "values", or None."""
        position, is_in_string = 0, False
        while position < size:
            end = min(position + _WINDOW, size)
            if is_in_string:
                rest = _REST_OF_STRING.match(text, position, end)
                assert rest is not None  # it matches nothing, too
                is_in_string = not rest[1]
                if rest.end() == position and end == size:
                    return None  # a backslash at the very end
                position = rest.end()
                continue
            for found in _PART.finditer(text, position, end):
                if text[found.start()] == _QUOTE and not found[1]:
                    is_in_string = True
                    position = found.end()
                    break
                exceeded = self._count(text, found)
                if exceeded is not None:
                    return exceeded
            else:
                position = end
        return None

    def _count(self, text: bytes | mmap.mmap, part: re.Match[bytes]) -> str | None:
        """Count a part of the text; return the limit that it exceeds."""
        first = text[part.start()]
        if first in _OPENING:
            self._depth += 1
            self._num_values += 1
            if self._depth > self._max_depth:
                return "depth"
        elif first in _CLOSING:
            self._depth -= 1
        elif first != _QUOTE:
            self._num_values += part[0].count(b",")
        return "values" if self._num_values > self._max_values else None
