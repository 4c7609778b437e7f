"""Pages in the memory of the host, before another store or none.

A page that is written goes to both, and one that is found in the other store is kept here, too. If
memory is full, a few pages that were not used for longest go. Each page before it in its prefix
makes a page a second older, as in a folder, so the last pages of a prefix go first.
"""

import heapq
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ropewalk.model_runtime.engine.kv_disk.buffers import Bytes
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, Pause
from ropewalk.model_runtime.engine.kv_disk.files.page_file import PageFormat
from ropewalk.model_runtime.engine.kv_disk.page_store import Look, PageStore

_EVICTED_AT_ONCE = 16  # one of so many, or one page


@dataclass(slots=True)
class _Held:
    """A page, its place in its prefix, and when it was used."""

    content: Bytes
    depth: int
    used_s: float


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
        """Hold none yet. `below`: the store behind it; None: there is none. `pause`: its reads'."""
        self.form = form
        self._most = most_bytes // form.num_bytes
        self._counting = counting
        self._below = below
        self._pause = pause
        self._name = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page from here, or from below unless that pauses. Raises BadPageError."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                held.used_s = time.monotonic()
        if held is not None:
            np.copyto(np.frombuffer(into, np.uint8), held.content)
            with self._counting as counts:
                counts.memory["read"] += 1
            return True
        if self._below is None or self._pause.is_on or not self._below.get(key, into):
            return False
        self._pause.ended_well()
        self._keep(key, into, None)
        return True

    def put(self, key: bytes, page: memoryview, depth: int) -> bool:
        """Keep a page here, and write it below. Raises StoreError or OSError."""
        is_new = self._keep(key, page, depth)
        return is_new if self._below is None else self._below.put(key, page, depth)

    def evict(self, keys: Sequence[bytes]) -> None:
        """Delete pages here and below. Raises StoreError."""
        with self._lock:
            for key in keys:
                self._held.pop(key, None)
            self._count_bytes()
        if self._below is not None:
            self._below.evict(keys)

    def touch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Record that pages, each with its depth, are used now. Raises StoreError."""
        with self._lock:
            for key, depth in pages:
                held = self._held.get(key)
                if held is not None:
                    held.depth, held.used_s = depth, time.monotonic()
        if self._below is not None:
            self._below.touch(pages)

    def look(self) -> Look | None:
        """Look at the store below."""
        return Look(0, self._name) if self._below is None else self._below.look()

    def _keep(self, key: bytes, page: memoryview, depth: int | None) -> bool:
        """Hold a page, `depth` is None where it is not known; return whether it is new here."""
        content = np.frombuffer(page, np.uint8).copy()
        with self._lock:
            before = self._held.get(key)
            if before is None and len(self._held) >= self._most:
                self._make_room()
            if depth is None:
                depth = 0 if before is None else before.depth
            self._held[key] = _Held(content, depth, time.monotonic())
            self._count_bytes()
        return before is None

    def _make_room(self) -> None:
        num = max(1, self._most // _EVICTED_AT_ONCE)
        ages = ((held.used_s - held.depth, key) for key, held in self._held.items())
        oldest = heapq.nsmallest(num, ages)
        for _, key in oldest:
            del self._held[key]
        with self._counting as counts:
            counts.memory["evicted"] += len(oldest)

    def _count_bytes(self) -> None:
        with self._counting as counts:
            counts.num_memory_bytes = len(self._held) * self.form.num_bytes
