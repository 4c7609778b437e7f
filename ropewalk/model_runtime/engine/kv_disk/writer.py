"""The thread that opens the store, then writes copies of pages and keeps the store's size.

A page is written only if all of its numbers are finite, so no stored page can spread a NaN.
"""

import hashlib
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import structlog

from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers, Bytes, Done
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, Pause
from ropewalk.model_runtime.engine.kv_disk.finite import IsFinite
from ropewalk.model_runtime.engine.kv_disk.page_store import PageStore, StoreError

_LOOK_S = 600.0
_LOWEST_PRIORITY = 19
_TOUCH_S = 60.0  # a page in use is touched once in this time
_MOST_USED = 256  # prefixes to be touched; of more, as behind a disk that hangs, the oldest are not
_MOST_TOUCHED = 1 << 16  # pages whose last touch is known
_TOUCHED_AT_ONCE = 16  # pages, between two writes

_log = structlog.get_logger(__name__)


class Copied(NamedTuple):
    """A copy of a page to be written."""

    key: bytes
    depth: int  # pages before it in its prefix
    buffer: Bytes
    done: Done | None = None  # None: the copy has ended
    num_used: int | None = None  # bytes of layers; the rest is of other prompts. None: all


class Writer:
    """The thread, its queue, and the store once it is open."""

    def __init__(
        self,
        place: str,
        open_store: Callable[[], PageStore],
        is_finite: IsFinite,
        buffers: Buffers,
        counting: Counting,
    ) -> None:
        """Prepare.

        `place` names the store in the log. `open_store` may take long, because it hashes weights;
        it may raise OSError or StoreError.
        """
        self._place = place
        self._open_store = open_store
        self._is_finite = is_finite
        self.buffers = buffers
        self._counting = counting
        self.pause = Pause("writes")
        self.store: PageStore | None = None  # None: it is not open yet
        self.is_off = False  # it could not be opened
        self._queue: queue.SimpleQueue[Copied | list[bytes] | None] = queue.SimpleQueue()
        self._used: deque[list[tuple[bytes, int]]] = deque(maxlen=_MOST_USED)
        self._to_touch: list[tuple[bytes, int]] = []  # key and depth, of one prefix, last one first
        self._touched: dict[bytes, float] = {}  # when, of pages in use
        self._left_bytes = 0  # that may be written before the next look
        self._looked_s = -math.inf
        self._opening_s = 0.0  # with the hash of the weights
        self._is_told = False  # that the store is open
        self._reopens = False  # after a pause, because another disk may be mounted there
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread; it calls `wake` when the store is open, and after each write."""
        self._wake = wake
        self._thread.start()

    def put(self, copied: Copied) -> None:
        self._queue.put(copied)

    def delete(self, keys: list[bytes]) -> None:
        self._queue.put(keys)

    def used(self, pages: list[tuple[bytes, int]]) -> None:
        """Let the store know, soon, that the pages of a prefix, each with its depth, are in use."""
        self._used.append(pages)
        if len(self._used) == 1:
            self._queue.put([])  # wakes the thread

    def stop(self, timeout_s: float) -> None:
        """Write what is queued, for so long at most, and end the thread."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self._open():
                _give_way()
                while self._serve_next():
                    pass
        except Exception:  # noqa: BLE001  # the engine goes on without it
            self.is_off = True
            _log.exception("kv_disk_writer_ended")

    def _serve_next(self) -> bool:
        """Do what is next in the queue, then touch a few pages; return False at its end.

        A prefix in use may have hundreds of pages. No write waits until all of them are touched.
        """
        try:
            item = self._queue.get(timeout=0 if self._used or self._to_touch else _LOOK_S)
        except queue.Empty:
            item = []
        if item is None:
            return False
        self._look_if_due()
        if isinstance(item, Copied):
            try:
                if item.done is not None:
                    item.done.synchronize()
                if item.num_used is not None:
                    item.buffer[item.num_used :] = 0
                self._write(item)
            finally:
                self.buffers.give(item.buffer)
            self._wake()
        else:
            self._delete(item)
        self._touch_some()
        return True

    def _open(self) -> bool:
        began = time.monotonic()
        try:
            self.store = self._open_store()
        except (OSError, StoreError) as error:
            self.is_off = True
            _log.warning("kv_disk_off", place=self._place, reason=str(error))
            return False
        self._opening_s = time.monotonic() - began
        self._look_if_due()
        self._wake()
        return True

    def _write(self, copied: Copied) -> None:
        store = self.store
        assert store is not None
        if self.pause.is_on or not self._is_finite(copied.buffer):
            self._counting.page("dropped")
            return
        began = time.monotonic()
        try:
            if store.has(copied.key):
                return
            self._reopen_after_fault(store)
            if not self._may_write(store):
                self._counting.page("dropped")
                return
            is_written = store.write(copied.key, copied.buffer.data, copied.depth)
        except (OSError, StoreError) as error:
            self._counting.page("dropped")
            self._pause(error)
            return
        self._touched[copied.key] = time.monotonic()
        if not is_written:
            return
        self.pause.ended_well()
        self._left_bytes -= store.form.file_bytes
        self._counting.page("written")
        self._counting.grew(store.form.file_bytes)
        self._counting.spent(write_s=time.monotonic() - began)

    def _touch_some(self) -> None:
        """Touch a few of the pages in use that were not touched of late."""
        store = self.store
        if store is None or self.pause.is_on:
            self._used.clear()
            self._to_touch.clear()
            return
        now = time.monotonic()
        before = now - _TOUCH_S
        if len(self._touched) > _MOST_TOUCHED:
            self._touched = {key: at for key, at in self._touched.items() if at > before}
        due: list[tuple[bytes, int]] = []
        while len(due) < _TOUCHED_AT_ONCE and (self._to_touch or self._used):
            if not self._to_touch:
                self._to_touch = self._used.popleft()[::-1]
                continue
            key, depth = self._to_touch.pop()
            if self._touched.get(key, before) <= before:
                due.append((key, depth))
                self._touched[key] = now
        if not due:
            return
        try:
            store.touch(due)
        except StoreError as error:
            self._pause(error)

    def _may_write(self, store: PageStore) -> bool:
        """Return whether a page may be written; look if this process has used its allowance."""
        if self._left_bytes < store.form.file_bytes:
            self._look_if_due(is_due=True)
        return self._left_bytes >= store.form.file_bytes

    def _look_if_due(self, *, is_due: bool = False) -> None:
        store = self.store
        is_due = is_due or time.monotonic() > self._looked_s + _LOOK_S
        if store is None or not is_due or self.pause.is_on:
            return
        try:
            self._reopen_after_fault(store)
            room = store.look()
        except (OSError, StoreError) as error:
            self._pause(error)
            return
        self._tell_open(store)
        if room is None:  # another process makes room; until then nothing is written
            return
        self._looked_s = time.monotonic()
        self._left_bytes = room.left_bytes
        # Servers of another identity use the same place, and not the same pages.
        place = hashlib.sha256(room.name.encode() + store.form.identity).hexdigest()[:16]
        self._counting.holds(room.num_bytes, place)
        self._counting.page("evicted", room.num_evicted)
        for _ in range(room.num_foreign):
            self._counting.bad("foreign")

    def _tell_open(self, store: PageStore) -> None:
        """Say once that the store can be used: a first command has been answered."""
        if not self._is_told:
            self._is_told = True
            identity = store.form.identity.hex()[:32]
            seconds = round(self._opening_s, 2)
            _log.info("kv_disk_open", place=self._place, identity=identity, seconds=seconds)

    def _reopen_after_fault(self, store: PageStore) -> None:
        if self._reopens:
            store.reopen()
            self._reopens = False

    def _pause(self, error: Exception) -> None:
        self._reopens = True
        self.pause.begin(getattr(error, "strerror", None) or str(error))

    def _delete(self, keys: list[bytes]) -> None:
        if self.store is None or not keys:
            return
        try:
            self.store.discard(keys)
        except StoreError as error:
            self._pause(error)


def _give_way() -> None:
    """Give the thread the lowest priority, where threads have one of their own."""
    if sys.platform == "linux":
        # Kernels compute on all cores, and each waits for the slowest of their threads.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
