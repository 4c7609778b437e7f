"""The folder of page files, which several processes may share.

`<folder>/v1/<identity>/<first two digits of the key>/<key>`, all in hex. A file is written under a
temporary name and renamed, so a name is there with a whole file or not at all. After a crash of the
machine a file may be short or zero, which its checksum tells. So nothing waits for the disk.

Folders have the mode 0700 and files 0600, because unrotated keys of the first layer are the prompt.
No link below the folder is followed.
"""

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ropewalk.model_runtime.engine.kv_disk.files.page_file import (
    BadPageError,
    PageFormat,
    read_page,
    write_page,
)
from ropewalk.model_runtime.engine.kv_disk.page_store import StoreError

PAGES = "v1"  # the folder of all pages, by the version of the layout
IDENTITY_DIGITS = 32
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A FIFO in place of a file must not wait for its other end.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PAGE_NAME = re.compile("[0-9a-f]{64}")
_NAME = ".place"  # of the folder itself
_NAME_BYTES = 16
_PART_NAME = re.compile(r"\.[0-9a-f]{16}")


class FolderError(StoreError):
    """A folder that cannot hold pages; the message is the end of a sentence about it."""


def open_root(path: Path, *, create: bool) -> int:
    """Return a descriptor of the folder, made with the mode 0700 if it is absent.

    Raises FolderError if it is no private folder of this user, or cannot be made.
    """
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        root = os.open(path, _FOLDER_FLAGS)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise FolderError(f"must be a folder and no link, got {path}") from error
        raise FolderError(f"cannot use {path}: {error.strerror}") from error
    facts = os.fstat(root)
    mode = stat.S_IMODE(facts.st_mode)
    problem = None
    if facts.st_uid != os.geteuid():
        problem = f"must belong to the user of the server ({os.geteuid()}), and {path} is of user "
        problem += str(facts.st_uid)
    elif mode & 0o077:
        problem = f"must have the mode 0700, because pages tell prompts, and {path} has {mode:04o}"
    if problem is not None:
        os.close(root)
        raise FolderError(problem)
    return root


def own_name(root: int) -> str:
    """Return the name of an open folder, which is made at random at first. Raises OSError.

    Two that make it at once may differ until they ask again.
    """
    with suppress(FileNotFoundError):
        name = _read_name(root)
        if len(name) == 2 * _NAME_BYTES:  # a crash may leave it short or empty
            return name
    part = f"{_NAME}.{secrets.token_hex(8)}"
    file = os.open(part, _WRITE_FLAGS, 0o600, dir_fd=root)
    try:
        os.write(file, secrets.token_bytes(_NAME_BYTES))
    finally:
        os.close(file)
    os.rename(part, _NAME, src_dir_fd=root, dst_dir_fd=root)
    return _read_name(root)


def _read_name(root: int) -> str:
    file = os.open(_NAME, _READ_FLAGS, dir_fd=root)
    try:
        return os.read(file, _NAME_BYTES).hex()
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class PageEntry:
    """One file of the folder."""

    path: str  # below the folder
    num_bytes: int
    used_s: float  # when it was last written or read, in seconds since 1970; within the hour
    is_part: bool  # a write that has not ended, or never will


def entries(root: int) -> Iterator[PageEntry]:
    """Yield all files of pages below an open folder; files of other names are left alone.

    Files and folders that go away meanwhile are left out. Raises OSError for a folder that cannot
    be listed.
    """

    def unless_gone(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    with suppress(FileNotFoundError):
        for folder, _, names, place in os.fwalk(PAGES, onerror=unless_gone, dir_fd=root):
            for name in names:
                is_part = _PART_NAME.fullmatch(name) is not None
                if not is_part and _PAGE_NAME.fullmatch(name) is None:
                    continue
                with suppress(OSError):
                    facts = os.stat(name, dir_fd=place, follow_symlinks=False)
                    yield PageEntry(f"{folder}/{name}", facts.st_size, facts.st_mtime, is_part)


class PageFolder:
    """The pages of one cache in a folder. Every method may be called by any thread."""

    def __init__(self, path: Path, form: PageFormat) -> None:
        """Open the folder. Raises FolderError or OSError."""
        self.path = path
        self.form = form
        self._shelves = f"{PAGES}/{form.identity.hex()[:IDENTITY_DIGITS]}"
        self.root = open_root(path, create=True)
        self._make_shelves()

    def close(self) -> None:
        os.close(self.root)

    def reopen(self) -> None:
        """Open the folder again, if it is there. Raises FolderError or OSError."""
        # The descriptor keeps its number, because another thread may use it.
        root = open_root(self.path, create=False)
        try:
            os.dup2(root, self.root, inheritable=False)
        finally:
            os.close(root)
        self._make_shelves()

    def has(self, key: bytes) -> bool:
        """Return whether a file has this key, whatever its content."""
        try:
            os.stat(self._path(key), dir_fd=self.root, follow_symlinks=False)
        except OSError:
            return False
        return True

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read a page; return False if there is none. Raises BadPageError."""
        try:
            with self._shelf(key) as shelf:
                file = os.open(key.hex(), _READ_FLAGS, dir_fd=shelf)
                try:
                    read_page(file, self.form, key, into)
                finally:
                    os.close(file)
        except FileNotFoundError:
            return False
        except OSError as error:
            # A link is no page. Other errors are of the machine, and the file may be good.
            is_link = error.errno == errno.ELOOP
            raise BadPageError("foreign" if is_link else "unreadable") from error
        return True

    def write(self, key: bytes, page: memoryview, depth: int = 0) -> bool:
        """Write a page under its key; `depth` pages are before it. Raises OSError."""
        with self._shelf(key, create=True) as shelf:
            part = f".{secrets.token_hex(8)}"
            file = os.open(part, _WRITE_FLAGS, 0o600, dir_fd=shelf)
            try:
                try:
                    write_page(file, self.form, key, page)
                finally:
                    os.close(file)
                os.rename(part, key.hex(), src_dir_fd=shelf, dst_dir_fd=shelf)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=shelf)
                raise
        self.touch([(key, depth)])
        return True

    def discard(self, keys: Sequence[bytes]) -> None:
        """Delete the files of these keys, or the links in their place, if there are any."""
        for key in keys:
            with suppress(OSError), self._shelf(key) as shelf:
                os.unlink(key.hex(), dir_fd=shelf)

    def touch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Record that pages, each with its depth, were used now.

        Each of the `depth` pages before it makes a page a second older. So the last pages of a
        prefix are deleted before the first ones, without which they are of no use.
        """
        for key, depth in pages:
            used_s = time.time() - depth
            with suppress(OSError), self._shelf(key) as shelf:
                os.utime(key.hex(), (used_s, used_s), dir_fd=shelf, follow_symlinks=False)

    def _path(self, key: bytes) -> str:
        return f"{self._shelves}/{key.hex()[:2]}/{key.hex()}"

    def _make_shelves(self) -> None:
        at = ""
        for name in self._shelves.split("/"):
            at = f"{at}{name}"
            with suppress(FileExistsError):
                os.mkdir(at, 0o700, dir_fd=self.root)
            at += "/"

    @contextmanager
    def _shelf(self, key: bytes, *, create: bool = False) -> Iterator[int]:
        """Open the folder of a key for the block, by steps that follow no link. Raises OSError."""
        names = [*self._shelves.split("/"), key.hex()[:2]]
        place = self.root
        try:
            for name in names:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=place)
                inner = os.open(name, _FOLDER_FLAGS, dir_fd=place)
                if place != self.root:
                    os.close(place)
                place = inner
            yield place
        finally:
            if place != self.root:
                os.close(place)
