"""How fast this machine's memory is read, which bounds the tokens of one sequence."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

_NUM_BYTES = 1 << 28  # more than caches hold
_ROUNDS = 3


def read_rate(num_threads: int) -> float:
    """Measure the bytes that threads read from memory in a second, together.

    It takes a third of a second: numpy sums an array that no cache holds, and the best of three
    counts.
    """
    import numpy as np  # noqa: PLC0415  # only mixtures need it here

    numbers = np.ones(_NUM_BYTES // 8, np.int64)
    shares = np.array_split(numbers, num_threads)
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.sum, shares))  # without the GIL
            best = max(best, numbers.nbytes / (time.perf_counter() - began))
    return best


def rate_text(num_bytes: int) -> str:
    """Return the tokens a second of one sequence, if each reads so many bytes of weights."""
    num_threads = len(os.sched_getaffinity(0))
    rate = read_rate(num_threads)
    return (
        f"{rate / 1e9:.3g} GB/s read by {num_threads} thread{'s' * (num_threads > 1)}, so at most "
        f"{rate / num_bytes:,.3g} tokens/s for one sequence without drafts"
    )
