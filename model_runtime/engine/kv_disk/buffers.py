"""Host memory for pages on their way between cache and files, and the copies of a page.

A step may write to the cache at any time, so no other thread reads or writes it. The engine's
thread copies a page in a millisecond for three megabytes.
"""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class PageMemory:
    """The bytes of each page of a cache, over all its tensors."""

    def __init__(self, tensors: Sequence[Bytes]) -> None:
        """Keep views [pages, bytes of a page] of every tensor, in the order of the file."""
        self._tensors = tensors
        self.num_bytes = sum(each.shape[1] for each in tensors)

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


class Buffers:
    """At most so many buffers of one size, made when they are first needed."""

    def __init__(self, num_bytes: int, most: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[Bytes] = []
        self._num_taken = threading.Semaphore(most)
        self._lock = threading.Lock()

    def take(self, timeout_s: float | None = None) -> Bytes | None:
        """Return a buffer, or None if there is none in this time; by default at once."""
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
        return np.empty(self.num_bytes, np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back."""
        with self._lock:
            self._free.append(buffer)
        self._num_taken.release()
