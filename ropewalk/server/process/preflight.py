"""The steps before torch is imported: SIGHUP, memory, and waiting threads."""

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt
_MOST_ARENAS = 2
# The next step allocates again what a step frees. If the memory goes back to the system in between,
# every page of it is fetched and cleared again. That took a fifth of the time of a prefill in
# chunks of 1,024 tokens.
_KEPT_BYTES = 128 << 20
_LARGEST_KEPT_BYTES = 32 << 20  # the maximum that glibc allows
# oneDNN, and torch's cache in front of it, keep 1,024 compiled products by default. Every shape and
# row count needs one or two. model_runtime/layers/packed_product.py uses at most 16 row counts, and
# a model has about five shapes. A limit of 64 made decode steps of changing size up to 2 times
# slower.
_MOST_PRIMITIVES = "256"
# Rounds of an empty loop. libgomp's default is 300,000, which takes some milliseconds. If a thread
# has lost its core, a waiting thread then uses the core that the first one needs.
# libgomp uses 1,000 if threads outnumber cores. That outlasts the gap between two products.
# Measured on two cores with two threads and other work beside them, 36 products of one row:
# 846 ms with 300,000 rounds, 139 with 10,000, 35 to 52 with 1,000, 24 to 52 with none
# (OMP_WAIT_POLICY=passive). Binding threads to cores (OMP_PROC_BIND) helped 300,000 rounds a
# little, and made 1,000 and none 3 times slower.
_SPINS = "1000"
_ALREADY_SAID = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def keep_hangups(arguments: Sequence[str]) -> None:
    """Keep SIGHUP until `serve` handles it; `arguments` are those of the command.

    Else the signal ends the process while the command is imported. The system keeps a blocked
    signal and delivers it later. Other commands end with their terminal, as any program does.
    """
    if arguments[:1] == ["serve"] and hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def bound_memory() -> None:
    """Set each limit that the environment does not set already."""
    bound_primitives(os.environ)
    use_huge_pages(os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        if "MALLOC_ARENA_MAX" not in os.environ:
            # glibc gives each thread its own heap, and keeps all memory a heap has ever held.
            mallopt(_M_ARENA_MAX, _MOST_ARENAS)
        if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
            mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)


def bound_primitives(environment: MutableMapping[str, str]) -> None:
    """Bound the products that oneDNN keeps; torch reads these variables when it is imported."""
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        environment.setdefault(cache, _MOST_PRIMITIVES)


def use_huge_pages(environment: MutableMapping[str, str]) -> None:
    """Let torch ask for huge pages; it reads this variable at its first tensor.

    It does so for tensors from 2 MiB on, such as weights, keys and values
    (model_runtime/cpu_kernels/huge_pages.py has the reason).
    """
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def wait_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make waiting threads sleep soon, unless the environment sets how they wait."""
    if not any(name in environment for name in _ALREADY_SAID):
        environment["GOMP_SPINCOUNT"] = _SPINS
