"""The thread that opens the folder, then writes copies of pages and keeps the folder's size.

A page is written only if all of its numbers are finite, so no file can spread a NaN.
"""

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog

from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers, Bytes
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, Pause
from ropewalk.model_runtime.engine.kv_disk.folder import FolderError, PageFolder
from ropewalk.model_runtime.engine.kv_disk.janitor import allowance, sweep
from ropewalk.model_runtime.engine.kv_disk.page_file import PageFormat

_SWEEP_S = 600.0
_LOWEST_PRIORITY = 19
_TOUCH_S = 60.0  # a page in use is touched once in this time
_MOST_USED = 256  # prefixes to be touched; of more, as behind a disk that hangs, the oldest are not
_MOST_TOUCHED = 1 << 16  # pages whose last touch is known
# The bits of an exponent; a number that has them all is an infinity or no number.
_EXPONENTS = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}

_log = structlog.get_logger(__name__)


class Copied(NamedTuple):
    """A copy of a page to be written."""

    key: bytes
    depth: int  # pages before it in its prefix
    buffer: Bytes


class Writer:
    """The thread, its queue, and the folder once it is open."""

    def __init__(
        self,
        path: Path,
        cap_bytes: int,
        make_format: Callable[[], PageFormat],
        buffers: Buffers,
        counting: Counting,
    ) -> None:
        """Prepare. `make_format` may take long, because it hashes weights; it may raise OSError."""
        self._path = path
        self._cap_bytes = cap_bytes
        self._make_format = make_format
        self.buffers = buffers
        self._counting = counting
        self.pause = Pause("writes")
        self.folder: PageFolder | None = None  # None: it is not open yet
        self.is_off = False  # it could not be opened
        self._queue: queue.SimpleQueue[Copied | list[bytes] | None] = queue.SimpleQueue()
        self._used: deque[list[bytes]] = deque(maxlen=_MOST_USED)
        self._touched: dict[bytes, float] = {}  # when, of pages in use
        self._left_bytes = 0  # that may be written before the next sweep
        self._swept_s = 0.0
        self._reopens = False  # after a pause, because another disk may be mounted there
        self._wake: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """Start the thread; it calls `wake` when the folder is open, and after each write."""
        self._wake = wake
        self._thread.start()

    def put(self, copied: Copied) -> None:
        self._queue.put(copied)

    def delete(self, keys: list[bytes]) -> None:
        self._queue.put(keys)

    def used(self, keys: list[bytes]) -> None:
        """Let the janitor know, soon, that the pages of a prefix are in use."""
        self._used.append(keys)
        if len(self._used) == 1:
            self._queue.put([])  # wakes the thread; it takes all that are there

    def stop(self, timeout_s: float) -> None:
        """Write what is queued, for so long at most, and end the thread."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self._open():
                self._serve()
        except Exception:  # noqa: BLE001  # the engine goes on without it
            self.is_off = True
            _log.exception("kv_disk_writer_ended")

    def _serve(self) -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of its own
            # Kernels compute on all cores, and each waits for the slowest of their threads.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            try:
                item = self._queue.get(timeout=_SWEEP_S)
            except queue.Empty:
                self._sweep_if_due()
                continue
            if item is None:
                return
            if isinstance(item, list):
                self._delete(item)
                self._touch_used()
                continue
            try:
                self._write(item)
            finally:
                self.buffers.give(item.buffer)
            self._wake()

    def _open(self) -> bool:
        began = time.monotonic()
        try:
            form = self._make_format()
            self.folder = PageFolder(self._path, form)
        except (OSError, FolderError) as error:
            self.is_off = True
            _log.warning("kv_disk_off", folder=str(self._path), reason=str(error))
            return False
        identity = form.identity.hex()[:32]
        seconds = round(time.monotonic() - began, 2)
        _log.info("kv_disk_open", folder=str(self._path), identity=identity, seconds=seconds)
        self._sweep_if_due()
        self._wake()
        return True

    def _write(self, copied: Copied) -> None:
        folder = self.folder
        assert folder is not None
        if self.pause.is_on or not _is_finite(copied.buffer, folder.form.dtype):
            self._counting.page("dropped")
            return
        if folder.has(copied.key):
            return
        began = time.monotonic()
        try:
            if self._reopens:
                folder.reopen()
                self._reopens = False
            if not self._may_write(folder):
                self._counting.page("dropped")
                return
            folder.write(copied.key, copied.buffer.data)
            self._touch(folder, copied.key, copied.depth)
        except (OSError, FolderError) as error:
            self._counting.page("dropped")
            self._pause(error)
            return
        self.pause.ended_well()
        self._left_bytes -= folder.form.file_bytes
        self._counting.page("written")
        self._counting.grew(folder.form.file_bytes)
        self._counting.spent(write_s=time.monotonic() - began)

    def _touch(self, folder: PageFolder, key: bytes, depth: int) -> None:
        folder.touch(key, depth)
        self._touched[key] = time.monotonic()

    def _touch_used(self) -> None:
        """Touch the pages in use that were not touched of late."""
        folder = self.folder
        while self._used:
            keys = self._used.popleft()
            if folder is None or self.pause.is_on:
                continue
            before = time.monotonic() - _TOUCH_S
            if len(self._touched) > _MOST_TOUCHED:
                self._touched = {key: at for key, at in self._touched.items() if at > before}
            for depth, key in enumerate(keys):
                if self._touched.get(key, before) <= before:
                    self._touch(folder, key, depth)

    def _may_write(self, folder: PageFolder) -> bool:
        """Return whether a page may be written; sweep if this process has used its allowance."""
        if self._left_bytes < folder.form.file_bytes:
            self._sweep_if_due(is_due=True)
        return self._left_bytes >= folder.form.file_bytes

    def _sweep_if_due(self, *, is_due: bool = False) -> None:
        folder = self.folder
        if folder is None or not (is_due or time.monotonic() > self._swept_s + _SWEEP_S):
            return
        try:
            swept = sweep(folder.root, self._cap_bytes)
        except OSError as error:
            self._pause(error)
            return
        if swept is None:  # another process sweeps; until then nothing is written
            return
        self._swept_s = time.monotonic()
        room = self._cap_bytes - swept.num_bytes
        self._left_bytes = min(allowance(self._cap_bytes, folder.form.file_bytes), room)
        self._counting.holds(swept.num_bytes)
        self._counting.page("evicted", swept.num_evicted)

    def _pause(self, error: Exception) -> None:
        self._reopens = True
        self.pause.begin(getattr(error, "strerror", None) or str(error))

    def _delete(self, keys: list[bytes]) -> None:
        if self.folder is not None:
            for key in keys:
                self.folder.discard(key)


def _is_finite(page: Bytes, dtype: str) -> bool:
    """Return whether all numbers of a page are finite."""
    if dtype == "float32" and np.isfinite(np.add.reduce(page.view(np.float32))):
        return True  # a sum has no such number if no summand has; a finite sum may overflow
    exponent = _EXPONENTS[dtype]
    bits = page.view(np.uint32) if dtype == "float32" else page.view(np.uint16)
    return not bool(np.any((bits & bits.dtype.type(exponent)) == exponent))
