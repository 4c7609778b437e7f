"""What keeps a long-lived process from growing: caches of libraries that nobody here needs whole.

Both are set before torch is imported.
"""

import ctypes
import os
import sys

_M_ARENA_MAX = -8  # of glibc's mallopt
_MOST_ARENAS = 2
# oneDNN, and torch's cache in front of it, keep compiled products, 1,024 by default, one or two for
# every shape and count of rows. model_runtime/packed_linear.py has 16 counts of rows at most, and
# a model about five shapes; 64 of them made decode steps of changing size up to 2 times slower.
_MOST_PRIMITIVES = "256"


def bound_memory() -> None:
    """Set bounds that the environment does not set already."""
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, _MOST_PRIMITIVES)
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        # glibc gives each thread a heap of its own, and keeps what each has ever held.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, _MOST_ARENAS)
