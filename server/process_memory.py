"""What keeps a long-lived process from growing: caches of libraries that nobody here needs whole.

Both are set before torch is imported.
"""

import ctypes
import os
import sys

_M_ARENA_MAX = -8  # of glibc's mallopt
_MOST_ARENAS = 2
# oneDNN keeps a compiled product for every count of rows it has seen, 1,024 by default and near a
# megabyte each; chunks of prompts have every count. A steady load uses a few.
_MOST_PRIMITIVES = "64"


def bound_memory() -> None:
    """Set bounds that the environment does not set already."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _MOST_PRIMITIVES)
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        # glibc gives each thread a heap of its own, and keeps what each has ever held.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, _MOST_ARENAS)
