"""Threads that run compiled kernels beside each other.

Python's threads, since a kernel lets go of the interpreter's lock: a second OpenMP runtime beside
torch's would fight it for the cores.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

MOST_THREADS = 64  # started as they are needed

Share = TypeVar("Share")

_team = threading.Lock()


def run_shares(
    work: Callable[[Share], None],
    shares: Sequence[Share],
    give_up: Callable[[], None] | None = None,
) -> None:
    """Call `work` for each share, one of them here; an error in any is raised when all have ended.

    `give_up`: called first when one fails, or cannot be started, for others that wait for it.
    """
    if len(shares) == 1:  # a decode step has dozens of these
        work(shares[0])
        return

    def guarded(share: Share) -> None:
        try:
            work(share)
        except BaseException:
            if give_up is not None:
                give_up()
            raise

    first, *others = shares
    waiting: list[Future[None]] = []
    try:
        for share in others:
            waiting.append(_threads().submit(guarded, share))  # noqa: PERF401  # each that started
        work(first)
    except BaseException:
        if give_up is not None:
            give_up()
        raise
    finally:
        wait(waiting)
    for each in waiting:
        each.result()


def run_team(work: Callable[[int], None], size: int, give_up: Callable[[], None]) -> None:
    """Call `work` with 0 to `size` - 1, all at the same time, so that they may wait for each other.

    One team at a time: of two, each could wait for threads that the other has. `give_up` must end
    the waiting of all.
    """
    with _team:
        run_shares(work, range(size), give_up)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="kernel")
