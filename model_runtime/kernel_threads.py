"""Threads that run compiled kernels beside each other.

Python's threads, since a kernel lets go of the interpreter's lock: a second OpenMP runtime beside
torch's would fight it for the cores.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

MOST_THREADS = 64  # started as they are needed

Share = TypeVar("Share")


def run_shares(work: Callable[[Share], None], shares: Sequence[Share]) -> None:
    """Call `work` for each share, one of them here; an error in any is raised."""
    if len(shares) == 1:  # a decode step has dozens of these
        work(shares[0])
        return
    first, *others = shares
    waiting = [_threads().submit(work, share) for share in others]
    work(first)
    for each in waiting:
        each.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="kernel")
