"""The janitor keeps the folder within its size: one process at a time, by a lock on a file.

A process may write a thirty-second of the cap between two of its own sweeps, and a sweep leaves an
eighth free. So four processes that write at once stay within the cap.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PAGES = "v1"  # the folder of all pages, by the version of the layout
SMALLEST_CAP = 32  # in pages; a process writes a cap / 32 between two sweeps
_FREE = 8  # a sweep leaves a cap / 8 free
_LOCK = ".janitor"
_PART_S = 600.0  # a temporary file of this age has no writer
_PAGE_NAME = re.compile("[0-9a-f]{64}")
_PART_NAME = re.compile(r"\.[0-9a-f]{16}")


class PageEntry(NamedTuple):
    """One file of the folder."""

    path: Path
    num_bytes: int
    used_s: float  # when it was last written or read, in seconds since 1970; within the hour
    is_part: bool  # a write that has not ended, or never will


class Swept(NamedTuple):
    """What a sweep left and deleted."""

    num_bytes: int  # of all pages that are left
    num_pages: int
    num_evicted: int  # pages deleted because they were the oldest
    num_bytes_evicted: int  # of these


def entries(folder: Path) -> Iterator[PageEntry]:
    """Yield all files of pages of a folder; files of other names are left alone.

    Files and folders that go away meanwhile are left out. Raises OSError for a folder that cannot
    be listed.
    """

    def unless_gone(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for shelf, _, names in os.walk(folder / PAGES, onerror=unless_gone):
        for name in names:
            is_part = _PART_NAME.fullmatch(name) is not None
            if is_part or _PAGE_NAME.fullmatch(name) is not None:
                with suppress(OSError):
                    path = Path(shelf, name)
                    facts = path.stat()
                    yield PageEntry(path, facts.st_size, facts.st_mtime, is_part)


def sweep(folder: Path, cap_bytes: int) -> Swept | None:
    """Delete the oldest pages of a full folder, and what dead writers left.

    With a cap of 0 all pages go. Returns None if another process sweeps now. Raises OSError if the
    lock cannot be had, a folder cannot be listed, or a file cannot be deleted.
    """
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return _swept(folder, cap_bytes - cap_bytes // _FREE)


def _swept(folder: Path, most_bytes: int) -> Swept:
    found = sorted(entries(folder), key=lambda each: each.used_s)
    total, num_pages, num_evicted = sum(each.num_bytes for each in found), 0, 0
    num_bytes_evicted = 0
    stale_s = time.time() - _PART_S
    for each in found:
        is_stale = each.is_part and each.used_s < stale_s
        # A crash may leave an empty file of a page.
        is_over = total > most_bytes or (most_bytes == 0 and not each.num_bytes)
        if is_stale or (is_over and not each.is_part):
            each.path.unlink(missing_ok=True)  # another process may have deleted it
            total -= each.num_bytes
            if not each.is_part:
                num_evicted += 1
                num_bytes_evicted += each.num_bytes
        else:
            num_pages += not each.is_part
    return Swept(total, num_pages, num_evicted, num_bytes_evicted)
