"""The format of a page's file: its bytes are pinned, and whatever is wrong with one is a miss."""

import os
import resource
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.files.folder import (
    FolderError,
    FolderStore,
    check_folder,
)
from ropewalk.model_runtime.engine.kv_disk.files.janitor import sweep
from ropewalk.model_runtime.engine.kv_disk.files.page_file import BadPageError, PageFormat
from tests.model_runtime.engine.kv_disk.disk_engines import flip

FORM = PageFormat(bytes(range(32)), 64, 3, "bfloat16", keys_by_token=False, num_bytes=5000)
KEY = bytes(range(100, 132))
PAGE = np.arange(5000, dtype=np.uint32).astype(np.uint8)


def store_in(path: Path, form: PageFormat = FORM) -> FolderStore:
    return FolderStore(path, form, 1 << 30, Counting())


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    """A folder with one page."""
    made = store_in(tmp_path / "kv")
    assert made.put(KEY, PAGE.data)
    return made


def path_of(folder: FolderStore, key: bytes = KEY) -> Path:
    """The file of a key, as docs/design/prefix-store.md describes it."""
    return folder.path / "v1" / bytes(range(16)).hex() / key.hex()[:2] / key.hex()


def read(folder: FolderStore) -> np.ndarray:
    """The page that the folder has."""
    into = np.zeros(5000, np.uint8)
    assert folder.get(KEY, into.data)
    return into


def test_a_file_has_the_documented_bytes(folder: FolderStore) -> None:
    """The header is spelt out here field by field."""
    head = b"RWKVPAGE" + bytes([1, 0, 128, 0, 0, 0, 0, 0]) + bytes(range(32)) + KEY
    head += b"\x40\0\0\0" + b"\x03\0\0\0" + b"\x02\0\0\0" + b"\x88\x13\0\0\0\0\0\0"
    head += struct.pack("<I", zlib.crc32(PAGE.tobytes()))
    head += struct.pack("<I", zlib.crc32(head))
    assert path_of(folder).read_bytes() == head.ljust(128, b"\0") + PAGE.tobytes()
    assert np.array_equal(read(folder), PAGE)


def test_only_the_user_can_read_folder_and_files(folder: FolderStore) -> None:
    """Pages tell the prompt."""
    path = path_of(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    for parent in path.parents[:4]:
        assert parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("at", [*range(0, 128, 7), 127, 128, 3000, 5127])
def test_every_flipped_bit_is_found(folder: FolderStore, at: int) -> None:
    """One of header or page."""
    flip(path_of(folder), at)
    with pytest.raises(BadPageError) as error:
        read(folder)
    in_sum = 100 <= at < 104  # of the page, so that the header's own no longer fits
    assert error.value.reason == ("checksum" if at >= 128 and not in_sum else "foreign")


@pytest.mark.parametrize("size", [0, 1, 127, 128, 5127])
def test_a_file_that_a_crash_cut_is_found(folder: FolderStore, size: int) -> None:
    """Nothing is written to the disk at once, so this may happen."""
    os.truncate(path_of(folder), size)
    with pytest.raises(BadPageError, match="truncated"):
        read(folder)


def test_without_a_file_descriptor_a_page_is_unreadable_and_not_gone(folder: FolderStore) -> None:
    """The limit of the process says nothing about the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(BadPageError) as error:
            read(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error.value.reason == "unreadable"
    assert np.array_equal(read(folder), PAGE)


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """The sentence names the mode."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(FolderError, match=r"must have the mode 0700, .* has 0755"):
        check_folder(shared, create=True)
    with pytest.raises(FolderError, match="No such file"):
        check_folder(tmp_path / "absent", create=False)
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(FolderError, match="must be a folder, got"):
        check_folder(tmp_path / "file", create=False)


def test_a_sweep_deletes_the_oldest_pages_and_leaves_other_files(folder: FolderStore) -> None:
    """Of one prefix, the last pages go first."""
    keys = [bytes([number]) * 32 for number in range(40)]
    for depth, key in enumerate(keys):
        folder.put(key, PAGE.data)
        folder.touch([(key, depth)])
    notes = path_of(folder).with_name("notes.txt")
    notes.write_text("mine")
    stale = path_of(folder).with_name("." + "0" * 16)
    stale.write_bytes(b"x" * 9000)
    os.utime(stale, (0, 0))
    fresh = stale.with_name("." + "1" * 16)  # another process may be writing it
    fresh.write_bytes(b"x" * 100)
    swept = sweep(folder.path, 32 * FORM.file_bytes)
    assert swept is not None
    assert (swept.num_pages, swept.num_evicted) == (27, 14)
    assert swept.num_bytes_evicted == 14 * FORM.file_bytes
    assert swept.num_bytes == 27 * FORM.file_bytes + 100
    assert [key for key in keys if path_of(folder, key).exists()] == keys[:26]  # and KEY
    assert notes.is_file()
    assert fresh.is_file()
    assert not stale.exists()


def test_a_folder_has_a_name_of_its_own(folder: FolderStore, tmp_path: Path) -> None:
    """All who open it have the same one; what a crash left of it is made anew."""

    def name_of(path: Path) -> str:
        look = store_in(path).look()
        assert look is not None
        return look.name

    name = name_of(folder.path)
    assert len(name) == 32
    assert name_of(folder.path) == name != name_of(tmp_path / "other")
    (folder.path / ".place").write_bytes(b"short")
    assert len(name_of(folder.path)) == 32
    assert name_of(folder.path) == name_of(folder.path)


def test_one_process_sweeps_at_a_time(folder: FolderStore) -> None:
    """The lock is on a file of the folder, and another sweep returns at once."""
    import fcntl

    with (folder.path / ".janitor").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(folder.path, 1 << 30) is None
    assert sweep(folder.path, 1 << 30) is not None


_WRITE_ON = """
import sys
from pathlib import Path
from ropewalk.model_runtime.engine.kv_disk.files.folder import FolderStore
from ropewalk.model_runtime.engine.kv_disk.files.page_file import PageFormat
from ropewalk.model_runtime.engine.kv_disk.counts import Counting

form = PageFormat(bytes(range(32)), 64, 3, "bfloat16", False, 400_000)
folder = FolderStore(Path(sys.argv[1]), form, 1 << 40, Counting())
print("begun", flush=True)
number = int(sys.argv[2]) << 32
while True:
    number += 1
    folder.put(number.to_bytes(32, "big"), memoryview(bytes([number % 256]) * 400_000))
"""


def test_a_killed_writer_leaves_whole_pages(tmp_path: Path) -> None:
    """Whatever has the name of a page is the page; a write that was cut has another name."""
    form = PageFormat(bytes(range(32)), 64, 3, "bfloat16", keys_by_token=False, num_bytes=400_000)
    for run in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITE_ON, str(tmp_path / "kv"), str(run)],
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(0.02 + 0.003 * run)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    folder = store_in(tmp_path / "kv", form)
    names = [path.name for path in folder.path.glob("v1/*/*/*") if len(path.name) == 64]
    assert names
    into = np.zeros(400_000, np.uint8)
    for name in names:
        assert folder.get(bytes.fromhex(name), into.data)
        assert (into == int(name, 16) % 256).all()
