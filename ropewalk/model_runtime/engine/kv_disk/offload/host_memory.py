"""Pages in the memory of the host, before another place or none.

A page that is written goes to both, and one that is found in the other place is kept here, too. If
memory is full, the pages that were not used for longest go. Each page before it in its prefix makes
a page a second older, as in a folder, so the last pages of a prefix go first.
"""

import heapq
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ropewalk.model_runtime.engine.kv_disk.buffers import Bytes
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, Pause
from ropewalk.model_runtime.engine.kv_disk.files.page_file import PageFormat
from ropewalk.model_runtime.engine.kv_disk.page_store import PageStore, Room

_LEAST_ENTRIES = 64  # of the heap before it is made anew


@dataclass(slots=True)
class _Held:
    """A page, and its newest entry in the heap."""

    content: Bytes
    depth: int
    entry: int


class HostMemory:
    """At most so many bytes of pages. Any thread may call any method."""

    def __init__(
        self,
        form: PageFormat,
        most_bytes: int,
        counting: Counting,
        below: PageStore | None,
        pause: Pause,
    ) -> None:
        """Hold none yet. `below`: the place behind it; None: there is none. `pause`: its reads'."""
        self.form = form
        self._most = most_bytes // form.num_bytes
        self._counting = counting
        self._below = below
        self._pause = pause
        self._name = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}
        self._by_use: list[tuple[float, int, bytes]] = []  # a heap; old entries of a page stay
        self._entries = count()

    def has(self, key: bytes) -> bool:
        """Return whether a page need not be written, here and below. Raises StoreError."""
        return key in self._held and (self._below is None or self._below.has(key))

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read a page from here, or from below unless that pauses. Raises BadPageError."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._use(key, held)
        if held is not None:
            np.copyto(np.frombuffer(into, np.uint8), held.content)
            self._counting.in_memory("read")
            return True
        if self._below is None or self._pause.is_on or not self._below.read(key, into):
            return False
        self._pause.ended_well()
        self._keep(key, into, None)
        return True

    def write(self, key: bytes, page: memoryview, depth: int) -> bool:
        """Keep a page here, and write it below. Raises StoreError or OSError."""
        self._keep(key, page, depth)
        if self._below is None:
            return True
        return not self._below.has(key) and self._below.write(key, page, depth)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Delete pages here and below. Raises StoreError."""
        with self._lock:
            for key in keys:
                self._held.pop(key, None)
            self._tell()
        if self._below is not None:
            self._below.discard(keys)

    def touch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Record that pages, each with its depth, are used now. Raises StoreError."""
        with self._lock:
            for key, depth in pages:
                held = self._held.get(key)
                if held is not None:
                    held.depth = depth
                    self._use(key, held)
        if self._below is not None:
            self._below.touch(pages)

    def look(self) -> Room | None:
        """Return the room below; without a place below, each write makes its own room."""
        if self._below is not None:
            return self._below.look()
        return Room(sys.maxsize, 0, 0, self._name)

    def reopen(self) -> None:
        """Find the place below again. Raises StoreError or OSError."""
        if self._below is not None:
            self._below.reopen()

    def _keep(self, key: bytes, page: memoryview, depth: int | None) -> None:
        """Hold a page; `depth` is None where it is not known yet."""
        content = np.frombuffer(page, np.uint8).copy()
        with self._lock:
            if key not in self._held:
                while self._held and len(self._held) >= self._most:
                    self._evict()
                self._held[key] = _Held(content, 0, 0)
            if depth is not None:
                self._held[key].depth = depth
            self._use(key, self._held[key])
            self._tell()

    def _evict(self) -> None:
        _, entry, key = heapq.heappop(self._by_use)
        held = self._held.get(key)
        if held is not None and held.entry == entry:
            del self._held[key]
            self._counting.in_memory("evicted")

    def _use(self, key: bytes, held: _Held) -> None:
        held.entry = next(self._entries)
        heapq.heappush(self._by_use, (time.monotonic() - held.depth, held.entry, key))
        if len(self._by_use) > max(_LEAST_ENTRIES, 2 * len(self._held)):
            self._by_use = [
                each
                for each in self._by_use
                if (of := self._held.get(each[2])) is not None and of.entry == each[1]
            ]
            heapq.heapify(self._by_use)

    def _tell(self) -> None:
        self._counting.memory_holds(len(self._held) * self.form.num_bytes)
