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
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import structlog

from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers, Bytes, Done
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, Pause
from ropewalk.model_runtime.engine.kv_disk.finite import IsFinite
from ropewalk.model_runtime.engine.kv_disk.page_store import PageStore, StoreError

_LOOK_S = 600.0
_LOWEST_PRIORITY = 19
_TOUCH_S = 60.0  # a page in use is touched once in this time
_MOST_QUEUED = 1024  # behind a disk that hangs, no prefix more is touched
_MOST_TOUCHED = 1 << 16  # pages whose last touch is known

_log = structlog.get_logger(__name__)


_Found = TypeVar("_Found")


class _Used(NamedTuple):
    """Pages to be touched, each with its depth."""

    pages: list[tuple[bytes, int]]


class Copied(NamedTuple):
    """A copy of a page to be written."""

    key: bytes
    depth: int  # pages before it in its prefix
    buffer: Bytes
    num_used: int  # bytes of layers; the rest is of other prompts
    done: Done | None = None  # None: the copy has ended


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
        self._queue: queue.SimpleQueue[Copied | _Used | list[bytes] | None] = queue.SimpleQueue()
        self._touched: OrderedDict[bytes, float] = OrderedDict()  # when, of pages in use
        self._looked_s = -math.inf
        self._opening_s = 0.0  # with the hash of the weights
        self._is_told = False  # that the store is open
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread; it calls `wake` when the store is open, and after each write."""
        self._wake = wake
        self._thread.start()

    def put(self, copied: Copied) -> None:
        self._queue.put(copied)
        self._note_touched([copied.key])

    def delete(self, keys: list[bytes]) -> None:
        self._queue.put(keys)

    def used(self, pages: list[tuple[bytes, int]]) -> None:
        """Let the store know, soon, that the pages of a prefix, each with its depth, are in use."""
        before = time.monotonic() - _TOUCH_S
        due = [each for each in pages if self._touched.get(each[0], -math.inf) <= before]
        if due and not self.pause.is_on and self._queue.qsize() < _MOST_QUEUED:
            self._queue.put(_Used(due))
            self._note_touched(key for key, _ in due)

    def _note_touched(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._touched[key] = time.monotonic()
            self._touched.move_to_end(key)
        while len(self._touched) > _MOST_TOUCHED:
            self._touched.popitem(last=False)

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
        """Do what is next in the queue; return False at its end."""
        try:
            item = self._queue.get(timeout=_LOOK_S)
        except queue.Empty:
            item = []
        if item is None:
            return False
        self._look_if_due()
        if isinstance(item, Copied):
            try:
                if item.done is not None:
                    item.done.synchronize()
                item.buffer[item.num_used :] = 0
                self._write(item)
            finally:
                self.buffers.give(item.buffer)
            self._wake()
        elif isinstance(item, _Used):
            if not self.pause.is_on:
                self._tried(lambda store: store.touch(item.pages))
        elif item:
            self._tried(lambda store: store.evict(item))
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
        if self.pause.is_on or not self._is_finite(copied.buffer):
            self._counting.page("dropped")
            return
        began = time.monotonic()
        page = copied.buffer.data
        is_written = self._tried(lambda store: store.put(copied.key, page, copied.depth))
        if is_written is None:
            self._counting.page("dropped")
        elif is_written:
            self.pause.ended_well()
            with self._counting as counts:
                counts.pages["written"] += 1
                counts.num_bytes += len(page)
                counts.write_s += time.monotonic() - began

    def _look_if_due(self) -> None:
        if time.monotonic() < self._looked_s + _LOOK_S or self.pause.is_on:
            return
        look = self._tried(lambda store: store.look())
        if self.pause.is_on:
            return
        assert self.store is not None
        form = self.store.form
        if not self._is_told:  # a first command has been answered
            self._is_told = True
            seconds = round(self._opening_s, 2)
            _log.info("kv_disk_open", place=self._place, identity=form.name, seconds=seconds)
        if look is None:  # another process makes room
            return
        self._looked_s = time.monotonic()
        # Servers of another identity use the same place, and not the same pages.
        place = hashlib.sha256(look.name.encode() + form.identity).hexdigest()[:16]
        with self._counting as counts:
            counts.num_bytes, counts.place = look.num_bytes, place

    def _tried(self, command: Callable[[PageStore], _Found]) -> _Found | None:
        """Return what a command of the store returns; pause and return None at a fault."""
        assert self.store is not None
        try:
            return command(self.store)
        except (OSError, StoreError) as error:
            self.pause.begin(getattr(error, "strerror", None) or str(error))
            return None


def _give_way() -> None:
    """Give the thread the lowest priority, where threads have one of their own."""
    if sys.platform == "linux":
        # Kernels compute on all cores, and each waits for the slowest of their threads.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
