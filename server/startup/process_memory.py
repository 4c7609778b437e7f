"""What a long-lived process keeps: bounds of libraries' caches, and memory from step to step.

All is set before torch is imported.
"""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
_MOST_ARENAS = 2
# What a step frees, the next one takes again. Given back to the system in between, every page of it
# is fetched and cleared anew: a fifth of the time of a prompt read 1,024 tokens at a time.
_KEPT_BYTES = 128 << 20
_LARGEST_KEPT_BYTES = 32 << 20  # the most that glibc allows
# oneDNN, and torch's cache in front of it, keep compiled products, 1,024 by default, one or two for
# every shape and count of rows. model_runtime/packed_linear.py has 16 counts of rows at most, and
# a model about five shapes; 64 of them made decode steps of changing size up to 2 times slower.
_MOST_PRIMITIVES = "256"


def bound_memory() -> None:
    """Set bounds that the environment does not set already."""
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, _MOST_PRIMITIVES)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        if "MALLOC_ARENA_MAX" not in os.environ:
            # glibc gives each thread a heap of its own, and keeps what each has ever held.
            mallopt(_M_ARENA_MAX, _MOST_ARENAS)
        if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
            mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
