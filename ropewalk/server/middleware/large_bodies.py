"""Bodies that are too large to be parsed on the event loop, and the memory of all of them.

Their bytes are in mappings of their own, which go back to the system when they are released. In the
heap, hundreds of them would leave holes that no other request fills.
"""

import asyncio
import gc
import mmap
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE = 32768  # bytes; from here on, parsing takes longer than the way to a thread and back

_Result = TypeVar("_Result")


def _without_collection(parse: Callable[[bytes], _Result], body: bytes) -> _Result:
    """Return what `parse` makes of a body.

    Its many new objects would make Python look for garbage among all objects of the process, which
    holds every thread for 0.1 s, and a parsed body has no cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return parse(body)
    finally:
        if was_enabled:
            gc.enable()


class LargeBodies:
    """The memory of all large bodies of a process, and the thread that parses one at a time."""

    def __init__(self, max_total_bytes: int) -> None:
        self.max_total_bytes = max_total_bytes
        self.num_bytes = 0
        # One thread: more would share one interpreter, and hold more objects at once.
        self.thread = ThreadPoolExecutor(1, "large-bodies")


class LargeBody:
    """A body that counts in the memory of all from its first byte until it is released."""

    def __init__(self, bodies: LargeBodies, max_bytes: int) -> None:
        """Map room for a body; pages that it does not fill take no memory."""
        self._bodies = bodies
        self._map: mmap.mmap | None = mmap.mmap(-1, max_bytes)
        self.size = 0

    def append(self, piece: bytes) -> bool:
        """Add bytes; return False, without adding any, if all bodies would be too large."""
        assert self._map is not None
        bodies = self._bodies
        if bodies.num_bytes + len(piece) > bodies.max_total_bytes:
            return False
        bodies.num_bytes += len(piece)
        self._map[self.size : self.size + len(piece)] = piece
        self.size += len(piece)
        return True

    async def run(self, function: Callable[[mmap.mmap, int], _Result]) -> _Result:
        """Return what a function makes of the mapping and the body's size, in the thread."""
        assert self._map is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._bodies.thread, function, self._map, self.size)

    async def parsed(self, parse: Callable[[bytes], _Result]) -> _Result:
        """Return what `parse` makes of the body, in the thread, and release the body."""
        try:
            return await self.run(lambda text, size: _without_collection(parse, text[:size]))
        finally:
            self.release()

    def content(self) -> bytes:
        """Return a copy of the body; empty if it has been released."""
        return b"" if self._map is None else self._map[: self.size]

    def release(self) -> None:
        """Give the memory back. The mapping goes when the thread no longer reads it either."""
        if self._map is not None:
            self._map = None
            self._bodies.num_bytes -= self.size


# Strings are skipped whole, so that a bracket inside one does not count.
# Possessive, because the regex engine would otherwise store every character for backtracking.
_PART = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[{]|[\]}]|[^"\[\]{}]++', re.DOTALL)
_REST_OF_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
# Bytes that are looked at in one call of the regex engine, which keeps other threads waiting.
_WINDOW = 65536
_QUOTE, _OPENING, _CLOSING = ord('"'), b"[{", b"]}"


class JsonShape:
    """A count of a text's depth, values and numbers, which stops at the first limit exceeded.

    Values are the names, texts, lists, objects, true, false and null of the whole text. Each takes
    some time of the interpreter in whatever reads it. Numbers are counted by the commas.
    """

    def __init__(self, max_depth: int, max_values: int, max_numbers: int) -> None:
        self._max_depth, self._max_values = max_depth, max_values
        self._max_numbers = max_numbers
        self._depth = self._num_values = self._num_numbers = 0

    def exceeds(self, text: bytes | mmap.mmap, size: int) -> str | None:
        """Return what the first `size` bytes exceed: "depth", "values", "numbers", or None."""
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
                exceeded = self._count(text, found)
                if exceeded is not None:
                    return exceeded
                if text[found.start()] == _QUOTE and not found[1]:
                    is_in_string = True
                    position = found.end()
                    break
            else:
                position = end
        return None

    def _count(self, text: bytes | mmap.mmap, part: re.Match[bytes]) -> str | None:
        """Count a part of the text; return the limit that it exceeds."""
        first = text[part.start()]
        if first == _QUOTE:
            self._num_values += 1
        elif first in _OPENING:
            self._depth += 1
            self._num_values += 1
            if self._depth > self._max_depth:
                return "depth"
        elif first in _CLOSING:
            self._depth -= 1
        else:
            words = part[0]
            self._num_numbers += words.count(b",")
            self._num_values += words.count(b"u") + words.count(b"s")  # true and null, false
            if self._num_numbers > self._max_numbers:
                return "numbers"
        return "values" if self._num_values > self._max_values else None
