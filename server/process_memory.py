"""What keeps a long-lived process from growing: caches of libraries that nobody here needs whole.

Both are set before torch is imported.
"""

import ctypes
import os
import sys

_M_ARENA_MAX = -8  # of glibc's mallopt
_MOST_ARENAS = 2
# oneDNN, and torch's cache in front of it, keep a compiled product for every count of rows they
# have seen, 1,024 by default: on the embedded model 7 MiB more for every 30 requests of mixed
# lengths. Chunks of prompts have every count; a steady load uses a few.
_MOST_PRIMITIVES = "64"


def bound_memory() -> None:
    """Set bounds that the environment does not set already."""
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, _MOST_PRIMITIVES)
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        # glibc gives each thread a heap of its own, and keeps what each has ever held.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, _MOST_ARENAS)
