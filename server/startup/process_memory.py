"""Limits on library caches, and on the memory that a long-lived process keeps between steps.

They are set before torch is imported.
"""

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
_MOST_ARENAS = 2
# The next step allocates again what a step frees. If the memory goes back to the system in between,
# every page of it is fetched and cleared again. That took a fifth of the time of a prefill in
# chunks of 1,024 tokens.
_KEPT_BYTES = 128 << 20
_LARGEST_KEPT_BYTES = 32 << 20  # the maximum that glibc allows
# oneDNN, and torch's cache in front of it, keep 1,024 compiled products by default. Every shape and
# row count needs one or two. model_runtime/packed_linear.py uses at most 16 row counts, and a model
# has about five shapes. A limit of 64 made decode steps of changing size up to 2 times slower.
_MOST_PRIMITIVES = "256"


def bound_memory() -> None:
    """Set each limit that the environment does not set already."""
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, _MOST_PRIMITIVES)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        if "MALLOC_ARENA_MAX" not in os.environ:
            # glibc gives each thread its own heap, and keeps all memory a heap has ever held.
            mallopt(_M_ARENA_MAX, _MOST_ARENAS)
        if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
            mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
