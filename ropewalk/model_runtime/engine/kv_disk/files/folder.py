"""The folder of page files, which several processes may share.

`<folder>/v1/<identity>/<first two digits of the key>/<key>`, all in hex. A file is written under a
temporary name and renamed, so a name is there with a whole file or not at all. After a crash of the
machine a file may be short or zero, which its checksum tells. So nothing waits for the disk.

Folders have the mode 0700 and files 0600, because unrotated keys of the first layer are the prompt.
"""

import os
import secrets
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.files.janitor import PAGES, SMALLEST_CAP, sweep
from ropewalk.model_runtime.engine.kv_disk.files.page_file import (
    BadPageError,
    PageFormat,
    read_page,
    write_page,
)
from ropewalk.model_runtime.engine.kv_disk.page_store import Look, StoreError

_NAME = ".place"  # of the folder itself
_NAME_BYTES = 16


class FolderError(StoreError):
    """A folder that cannot hold pages; the message is the end of a sentence about it."""


def check_folder(path: Path, *, create: bool) -> None:
    """Raise FolderError if a folder is not private, or not there; `create`: make it, if absent."""
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        mode = path.stat().st_mode
    except OSError as error:
        raise FolderError(f"cannot use {path}: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise FolderError(f"must be a folder, got {path}")
    if mode & 0o077:
        told = f"{path} has {stat.S_IMODE(mode):04o}"
        raise FolderError(f"must have the mode 0700, because pages contain prompt data, and {told}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise FolderError(f"cannot use {path}: it is another user's")


class FolderStore:
    """The pages of one cache in a folder, within its size. Any thread may call any method."""

    def __init__(self, path: Path, form: PageFormat, cap_bytes: int, counting: Counting) -> None:
        """Open the folder. Raises FolderError."""
        check_folder(path, create=True)
        self.path = path
        self.form = form
        self._cap_bytes = cap_bytes
        self._counting = counting
        self._pages = path / PAGES / form.name
        self._left_bytes = 0  # that may be written before the next sweep

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page; return False if there is none. Raises BadPageError."""
        try:
            with self._file(key).open("rb") as file:
                read_page(file, self.form, key, into)
        except FileNotFoundError:
            return False
        except OSError as error:  # of the machine; the file may be good
            raise BadPageError("unreadable") from error
        return True

    def put(self, key: bytes, page: memoryview, depth: int = 0) -> bool:
        """Write a page; `depth` pages are before it. Raises OSError.

        Returns False if a file has this key, whatever its content, or if another process makes
        room.
        """
        path = self._file(key)
        if path.exists():
            return False
        if self._left_bytes < self.form.file_bytes:
            self.look()
        if self._left_bytes < self.form.file_bytes:
            self._counting.page("dropped")
            return False
        for folder in path.parents[2::-1]:  # not the one above: its disk may be unmounted
            folder.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with os.fdopen(
                os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                write_page(file, self.form, key, page)
            part.rename(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        self._left_bytes -= self.form.file_bytes
        self.touch([(key, depth)])
        return True

    def evict(self, keys: Sequence[bytes]) -> None:
        """Delete the files of these keys, if there are any."""
        for key in keys:
            with suppress(OSError):
                self._file(key).unlink()

    def touch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Record that pages, each with its depth, were used now.

        Each of the `depth` pages before it makes a page a second older. So the last pages of a
        prefix are deleted before the first ones, without which they are of no use.
        """
        for key, depth in pages:
            used_s = time.time() - depth
            with suppress(OSError):
                os.utime(self._file(key), (used_s, used_s))

    def look(self) -> Look | None:
        """Sweep. Returns None if another process does. Raises OSError."""
        swept = sweep(self.path, self._cap_bytes)
        if swept is None:
            return None
        share = max(self._cap_bytes // SMALLEST_CAP, self.form.file_bytes)
        self._left_bytes = min(share, self._cap_bytes - swept.num_bytes)
        self._counting.page("evicted", swept.num_evicted)
        return Look(swept.num_bytes, self._name())

    def _name(self) -> str:
        """Return the folder's name, which is made at random at first. Raises OSError.

        Two that make it at once may differ until they look again.
        """
        path = self.path / _NAME
        with suppress(FileNotFoundError):
            name = path.read_bytes()
            if len(name) == _NAME_BYTES:  # a crash may leave it short or empty
                return name.hex()
        part = path.with_name(f"{_NAME}.{secrets.token_hex(8)}")
        part.write_bytes(secrets.token_bytes(_NAME_BYTES))
        part.replace(path)
        return path.read_bytes().hex()

    def _file(self, key: bytes) -> Path:
        return self._pages / key.hex()[:2] / key.hex()
