"""The janitor keeps the folder within its size: one process at a time, by a lock on a file.

A process may write a thirty-second of the cap between two of its own sweeps, and a sweep leaves an
eighth free. So four processes that write at once stay within the cap.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ropewalk.model_runtime.engine.kv_disk.files.folder import PageFolder, entries, own_name
from ropewalk.model_runtime.engine.kv_disk.files.page_file import PageFormat
from ropewalk.model_runtime.engine.kv_disk.page_store import Room

_LOCK = ".janitor"
_PART_S = 600.0  # a temporary file of this age has no writer
_FREE = 8  # a sweep leaves a cap / 8 free
_SHARE = 32  # a process writes a cap / 32 between two sweeps
SMALLEST_CAP = _SHARE  # in pages


class Swept(NamedTuple):
    """What a sweep left and deleted."""

    num_bytes: int  # of all pages that are left
    num_pages: int
    num_evicted: int  # pages deleted because they were the oldest
    num_bytes_evicted: int  # of these


def allowance(cap_bytes: int, file_bytes: int) -> int:
    """Return the bytes that a process may write between two sweeps."""
    return max(cap_bytes // _SHARE, file_bytes)


def sweep(root: int, cap_bytes: int) -> Swept | None:
    """Delete the oldest pages of a full folder, and what dead writers left.

    With a cap of 0 all pages go. Returns None if another process sweeps now. Raises OSError if the
    lock cannot be had, a folder cannot be listed, or a file cannot be deleted.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(_LOCK, flags, 0o600, dir_fd=root)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        return _swept(root, cap_bytes - cap_bytes // _FREE)
    finally:
        os.close(lock)


def _swept(root: int, most_bytes: int) -> Swept:
    found = sorted(entries(root), key=lambda each: each.used_s)
    total, num_pages, num_evicted = sum(each.num_bytes for each in found), 0, 0
    num_bytes_evicted = 0
    stale_s = time.time() - _PART_S
    for each in found:
        is_stale = each.is_part and each.used_s < stale_s
        # A crash may leave an empty file of a page.
        is_over = total > most_bytes or (most_bytes == 0 and not each.num_bytes)
        if is_stale or (is_over and not each.is_part):
            with suppress(FileNotFoundError):  # another process has deleted it
                os.unlink(each.path, dir_fd=root)
            total -= each.num_bytes
            if not each.is_part:
                num_evicted += 1
                num_bytes_evicted += each.num_bytes
        else:
            num_pages += not each.is_part
    return Swept(total, num_pages, num_evicted, num_bytes_evicted)


class FolderStore(PageFolder):
    """A folder of page files, and its janitor."""

    def __init__(self, path: Path, form: PageFormat, cap_bytes: int) -> None:
        """Open the folder. Raises FolderError or OSError."""
        super().__init__(path, form)
        self._cap_bytes = cap_bytes

    def look(self) -> Room | None:
        """Sweep. Returns None if another process does. Raises OSError."""
        swept = sweep(self.root, self._cap_bytes)
        if swept is None:
            return None
        free = self._cap_bytes - swept.num_bytes
        left = min(allowance(self._cap_bytes, self.form.file_bytes), free)
        return Room(left, swept.num_bytes, swept.num_evicted, own_name(self.root))
