"""Counts of the tier, which all of its threads add to, and pauses after faults."""

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
class TierCounts:
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
    """Counts for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = TierCounts()
        self._has_news = self._was_paused = False

    def page(self, event: str, num: int = 1) -> None:
        with self._lock:
            self._has_news = True
            self._counts.pages[event] += num

    def bad(self, reason: Reason) -> None:
        with self._lock:
            self._has_news = True
            self._counts.bad_files[reason] += 1

    def read(self, num_tokens: int) -> None:
        """Count a page of so many tokens that a sequence can use."""
        with self._lock:
            self._has_news = True
            self._counts.pages["read"] += 1
            self._counts.num_tokens_read += num_tokens

    def reached(self, num_tokens: int) -> None:
        """Count tokens that a sequence need not compute because of pages that were counted."""
        with self._lock:
            self._has_news = True
            self._counts.num_tokens_read += num_tokens

    def spent(self, *, read_s: float = 0.0, write_s: float = 0.0) -> None:
        """Add the time that files took."""
        with self._lock:
            self._has_news = True
            self._counts.read_s += read_s
            self._counts.write_s += write_s

    def grew(self, num_bytes: int) -> None:
        with self._lock:
            self._has_news = True
            self._counts.num_bytes += num_bytes

    def holds(self, num_bytes: int, place: str) -> None:
        """Note what a look has found."""
        with self._lock:
            self._has_news = True
            self._counts.num_bytes = num_bytes
            self._counts.place = place

    def in_memory(self, event: str) -> None:
        """Count a page of host memory."""
        with self._lock:
            self._has_news = True
            self._counts.memory[event] += 1

    def memory_holds(self, num_bytes: int) -> None:
        with self._lock:
            self._has_news = True
            self._counts.num_memory_bytes = num_bytes

    def take(self, *, is_paused: bool) -> TierCounts | None:
        """Return the counts since the last call; None if there are none."""
        with self._lock:
            taken = self._counts
            if not self._has_news and is_paused == self._was_paused:
                return None
            self._counts = TierCounts(
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
