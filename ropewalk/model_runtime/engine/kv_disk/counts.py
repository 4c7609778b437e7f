"""Counts of the lower store, which all of its threads add to, and pauses after faults."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import structlog

from ropewalk.model_runtime.engine.kv_disk.files.page_file import Reason

_FIRST_PAUSE_S = 60.0
_LONGEST_PAUSE_S = 3600.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class StoreCounts:
    """What happened since the last report, and the state of the folder."""

    pages: Counter[str] = field(
        default_factory=Counter
    )  # by event: read, written, dropped, evicted
    bad_files: Counter[Reason] = field(default_factory=Counter)
    num_tokens_read: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    num_bytes: int = 0  # of all files, as of the last sweep and what was written since
    is_paused: bool = False  # of writes or of reads
    memory: Counter[str] = field(default_factory=Counter)  # pages of host memory: read, evicted
    num_memory_bytes: int = 0  # of pages in host memory
    place: str | None = None  # equal for those who share its pages; None: it is not known


class Counting:
    """Counts for several threads: a block `with counting as counts` may change them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = StoreCounts()
        self._has_news = self._was_paused = False

    def __enter__(self) -> StoreCounts:
        """Return the counts since the last report, for this thread alone."""
        self._lock.acquire()
        self._has_news = True
        return self._counts

    def __exit__(self, *_: object) -> None:
        """Let other threads change them."""
        self._lock.release()

    def page(self, event: str, num: int = 1) -> None:
        with self as counts:
            counts.pages[event] += num

    def bad(self, reason: Reason) -> None:
        with self as counts:
            counts.bad_files[reason] += 1

    def take(self, *, is_paused: bool) -> StoreCounts | None:
        """Return the counts since the last call; None if there are none."""
        with self._lock:
            taken = self._counts
            if not self._has_news and is_paused == self._was_paused:
                return None
            self._counts = StoreCounts(
                num_bytes=taken.num_bytes,
                num_memory_bytes=taken.num_memory_bytes,
                place=taken.place,
            )
            self._has_news, self._was_paused = False, is_paused
        taken.is_paused = is_paused
        return taken


class Pause:
    """A time without reads or writes after a fault, twice as long after each further fault."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._until = 0.0
        self._next_s = _FIRST_PAUSE_S
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self._until

    def begin(self, reason: str) -> None:
        """Pause from now on, and say so in one line. No effect during a pause."""
        with self._lock:
            if self.is_on:
                return
            seconds, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_PAUSE_S)
            self._until = time.monotonic() + seconds
        _log.warning("kv_disk_paused", what=self._what, reason=reason, seconds=round(seconds))

    def ended_well(self) -> None:
        """Record a success, after which a pause is short again."""
        self._next_s = _FIRST_PAUSE_S
