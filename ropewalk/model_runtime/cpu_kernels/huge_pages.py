"""Memory in huge pages, for weights that a step reads from end to end.

With pages of 4 KiB, a core looks up an address for every 64 cache lines, and a virtual machine
looks up each one twice. Pages of 2 MiB need 512 times fewer lookups (docs/design/cpu-kernels.md has
what that is worth). Linux gives huge pages to whole aligned parts of a mapping only. So small
weights lie beside each other in one.
"""

import mmap
from contextlib import suppress
from threading import Lock
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

_LINE, _PAGE = 64, 2 << 20  # bytes
_FEWEST_BYTES = 32 << 20  # of a mapping

Bytes = NDArray[np.uint8]


class HugePages:
    """Mappings from which memory is cut, a piece after the other.

    A mapping lives as long as any piece of it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # The mapping with the most left, and the first byte that is left there.
        self._mapping: ref[Bytes] | None = None
        self._begin = 0

    def zeros(self, num_bytes: int) -> Bytes:
        """Return zeros that begin at a cache line. Raises MemoryError if the system has no more."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only; torch aligns to lines, too
            return torch.zeros(num_bytes, dtype=torch.uint8).numpy()
        size = -(-num_bytes // _LINE) * _LINE
        with self._lock:
            mapping = self._mapping() if self._mapping else None
            left = 0 if mapping is None else len(mapping) - self._begin
            begin = self._begin
            if mapping is None or size > left:
                mapping = _mapped(size)
                begin = -mapping.ctypes.data % _PAGE
            end = begin + size
            if size <= left or len(mapping) - end > left:
                self._mapping, self._begin = ref(mapping), end
            return mapping[begin : begin + num_bytes]


def _mapped(num_bytes: int) -> Bytes:
    """Return a new mapping that holds so many bytes from the begin of a huge page on."""
    size = (-(-max(num_bytes, _FEWEST_BYTES) // _PAGE) + 1) * _PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes cannot be mapped: {error.strerror}") from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


_HUGE_PAGES = HugePages()
zeros = _HUGE_PAGES.zeros
