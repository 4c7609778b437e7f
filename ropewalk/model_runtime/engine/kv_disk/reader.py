"""Threads that read the pages of a prefix in order, each page into memory of its own.

A thread may hang in a read for as long as the disk does. Its fetch is then given up, and nothing
waits for it. What it reads later is thrown away. No other thread takes its place, so at most
`_NUM_THREADS` hang. While all of them do, no read begins.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from ropewalk.model_runtime.engine.kv_disk.buffers import Buffers, Bytes
from ropewalk.model_runtime.engine.kv_disk.counts import Counting, Pause
from ropewalk.model_runtime.engine.kv_disk.files.page_file import BadPageError
from ropewalk.model_runtime.engine.kv_disk.page_store import PageStore
from ropewalk.model_runtime.scheduling.read_plan import Pages, stored_key

_NUM_THREADS = 2
_LOOK_S = 0.1  # how often a thread that waits for memory looks whether its fetch was given up
_NEWEST_WEIGHS = 0.25  # of a new time in the running mean
_PAGE_S = 2.0  # a page that takes longer pays nowhere: the disk hangs

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Fetch:
    """The read of the pages that a sequence lacks."""

    keys: list[bytes]  # of its prefix, from its start on
    num_before: int  # of them whose pages it would start with anyway
    pages: Pages  # those to be read; for the reading thread only
    deadline: float  # time.monotonic() at which the waiting sequence starts without the rest
    held: list[int]  # pages of the cache
    reserved: list[int]  # pages of the cache for those that are to come, and for the rest
    arrived: deque[tuple[bytes, Bytes]] = field(default_factory=deque)  # by their keys
    answered: threading.Event = field(default_factory=threading.Event)  # page, or none
    is_done: bool = False  # no further page arrives
    is_given_up: bool = False
    reading_since: float | None = None  # of the page that is being read now
    missing: list[bytes] = field(init=False)  # keys, for the look of every waiting sequence

    def __post_init__(self) -> None:
        """Note the keys that are missing."""
        self.missing = self.keys[self.num_before :]


class Reader:
    """The threads, and how long a page takes them."""

    def __init__(
        self,
        buffers: Buffers,
        counting: Counting,
        delete: Callable[[bytes], None],
        below: Pause | None = None,
    ) -> None:
        """Prepare.

        `delete` gets the key of each file that is not what it should be. `below`: the pause of the
        place behind host memory, which is read meanwhile; None: there is no host memory.
        """
        self.buffers = buffers
        self._counting = counting
        self._delete = delete
        self.pause = Pause("reads") if below is None else below
        self._has_memory = below is not None
        self.page_s: float | None = None  # None: no page was read yet
        self._fetches: queue.SimpleQueue[tuple[PageStore, Fetch] | None] = queue.SimpleQueue()
        self._read_now: list[Fetch | None] = [None] * _NUM_THREADS  # by each thread
        self._wake: Callable[[], None] = lambda: None

    def start(self, wake: Callable[[], None]) -> None:
        """Start the threads; they call `wake` for each page, and at the end of a fetch."""
        self._wake = wake
        for number in range(_NUM_THREADS):
            thread = threading.Thread(
                target=self._run, args=(number,), name="kv-disk-reader", daemon=True
            )
            thread.start()

    def stop(self) -> None:
        for _ in range(_NUM_THREADS):
            self._fetches.put(None)

    def submit(self, store: PageStore, fetch: Fetch) -> None:
        self._fetches.put((store, fetch))

    def is_usable(self, now: float) -> bool:
        """Return whether a read may begin: not in a pause, nor while every thread hangs."""
        return not self._is_stuck(now) and (self._has_memory or not self.pause.is_on)

    def is_paused(self, now: float) -> bool:
        """Return whether pages on disk are not read now."""
        return self.pause.is_on or self._is_stuck(now)

    def is_late(self, fetch: Fetch, now: float) -> bool:
        """Return whether a fetch is to be given up; pause if a page of it takes too long."""
        if _hangs(fetch, now):
            self.pause.begin("a read takes too long")
            return True
        return now > fetch.deadline or self._is_stuck(now)

    def _is_stuck(self, now: float) -> bool:
        """Return whether every thread hangs in a read that was given up."""
        return all(
            each is not None and each.is_given_up and _hangs(each, now) for each in self._read_now
        )

    def give_up(self, fetch: Fetch) -> None:
        """Read no further page for a fetch, and take its memory back."""
        fetch.is_given_up = True
        self._discard(fetch)

    def _discard(self, fetch: Fetch) -> None:
        while fetch.arrived:
            try:
                self.buffers.give(fetch.arrived.popleft()[1])
            except IndexError:  # another thread took the last one
                return

    def _run(self, number: int) -> None:
        while (item := self._fetches.get()) is not None:
            store, fetch = item
            self._read_now[number] = fetch
            try:
                self._read(store, fetch)
            except Exception:  # noqa: BLE001  # a sequence waits for the end of it
                _log.exception("kv_disk_read_failed")
            finally:
                self._read_now[number] = None
                fetch.is_done = True
                fetch.answered.set()
                self._wake()

    def _read(self, store: PageStore, fetch: Fetch) -> None:
        key = next(fetch.pages, None)
        while key is not None:
            buffer = None
            while buffer is None and not fetch.is_given_up:
                buffer = self.buffers.take(_LOOK_S)
            if buffer is None:
                break
            is_read = False
            try:
                is_read = not fetch.is_given_up and self._read_page(
                    store, fetch, stored_key(key), buffer
                )
            finally:
                if not is_read:
                    self.buffers.give(buffer)
            if is_read:
                fetch.arrived.append((key, buffer))
                if fetch.is_given_up:
                    self._discard(fetch)
                fetch.answered.set()
                self._wake()
            elif self.pause.is_on and not self._has_memory:
                break
            try:
                key = fetch.pages.send(is_read)
            except StopIteration:
                break

    def _read_page(self, store: PageStore, fetch: Fetch, key: bytes, buffer: Bytes) -> bool:
        began = fetch.reading_since = time.monotonic()
        try:
            if not store.get(key, buffer.data):
                return False
        except BadPageError as error:
            self._counting.bad(error.reason)
            if error.reason == "unreachable":
                self.pause.begin(str(error.__cause__))
            elif error.reason != "unreadable":  # else another read may find it whole
                self._delete(key)
            return False
        finally:
            fetch.reading_since = None
        taken = time.monotonic() - began
        with self._counting as counts:
            counts.read_s += taken
        if not fetch.is_given_up and not self._has_memory:
            self.pause.ended_well()
        before = taken if self.page_s is None else self.page_s
        self.page_s = before + _NEWEST_WEIGHS * (taken - before)
        return True


def _hangs(fetch: Fetch, now: float) -> bool:
    return fetch.reading_since is not None and now - fetch.reading_since > _PAGE_S
