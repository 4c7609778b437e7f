"""Host memory for pages on their way between cache and files, and the copies of a page.

A step may write to the cache at any time, so no other thread reads or writes it. On a CPU, the
engine's thread copies a page in a millisecond for three megabytes (`PageMemory`). A GPU copies
while it computes (offload/device_pages.py).
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

_log = structlog.get_logger(__name__)

Bytes = NDArray[np.uint8]


class Done(Protocol):
    """The end of a copy; events of torch have these methods."""

    def query(self) -> bool:
        """Return whether the copy has ended."""

    def synchronize(self) -> None:
        """Wait for its end."""


class PageCopies(Protocol):
    """Copies of whole pages between a cache and host memory. For the engine's thread only."""

    num_bytes: int  # of a page
    step_bytes: int  # copied in a step, each way, while requests run

    def new_buffer(self, num_bytes: int) -> Bytes:
        """Return new host memory for a page."""

    def copy_out(self, page: int, into: Bytes) -> Done | None:
        """Copy a page from the cache; None: it is done."""

    def copy_in(self, page: int, source: Bytes) -> Done | None:
        """Copy a page to the cache; None: it is done."""

    def let_steps_wait(self, done: Done) -> None:
        """Let the device run no later step before the end of a copy."""


class PageMemory:
    """The bytes of each page of a cache on a CPU, over all its tensors."""

    step_bytes = 4 << 20

    def __init__(self, tensors: Sequence[Bytes]) -> None:
        """Keep views [pages, bytes of a page] of every tensor, in the order of the file."""
        self._tensors = tensors
        self.num_bytes = sum(each.shape[1] for each in tensors)

    def new_buffer(self, num_bytes: int) -> Bytes:
        """Return new host memory for a page."""
        return _plain_buffer(num_bytes)

    def copy_out(self, page: int, into: Bytes) -> None:
        """Copy a page from the cache."""
        at = 0
        for tensor in self._tensors:
            end = at + tensor.shape[1]
            into[at:end] = tensor[page]
            at = end

    def copy_in(self, page: int, source: Bytes) -> None:
        """Copy a page to the cache."""
        at = 0
        for tensor in self._tensors:
            end = at + tensor.shape[1]
            tensor[page] = source[at:end]
            at = end

    def let_steps_wait(self, done: Done) -> None:
        """Do nothing: every copy is done when it returns."""


def _plain_buffer(num_bytes: int) -> Bytes:
    return np.empty(num_bytes, np.uint8)


class Buffers:
    """At most so many buffers of one size, made when they are first needed."""

    def __init__(
        self, num_bytes: int, most: int, new: Callable[[int], Bytes] = _plain_buffer
    ) -> None:
        """Make none yet. `new` makes one of so many bytes."""
        self.num_bytes = num_bytes
        self._new = new
        self._free: list[Bytes] = []
        self._num_taken = threading.Semaphore(most)
        self._lock = threading.Lock()
        self._is_told = False  # that there was no memory for one

    def take(self, timeout_s: float | None = None) -> Bytes | None:
        """Return a buffer, or None if there is none in this time; by default at once.

        There is none either if the machine has no memory for one.
        """
        is_left = (
            self._num_taken.acquire(blocking=False)
            if timeout_s is None
            else self._num_taken.acquire(timeout=timeout_s)
        )
        if not is_left:
            return None
        with self._lock:
            if self._free:
                return self._free.pop()
        try:
            return self._new(self.num_bytes)
        except (RuntimeError, MemoryError) as error:  # pinned memory, too, can run out
            self._num_taken.release()
            self._tell(error)
            if timeout_s is not None:
                time.sleep(timeout_s)
            return None

    def _tell(self, error: Exception) -> None:
        if not self._is_told:
            self._is_told = True
            _log.warning("kv_disk_no_memory", num_bytes=self.num_bytes, reason=str(error))

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back."""
        with self._lock:
            self._free.append(buffer)
        self._num_taken.release()
