"""`ropewalk cache`: what it deletes beside servers, and its sentences."""

import fcntl
import threading
from pathlib import Path
from typing import Any

import pytest

from ropewalk.model_runtime.engine.kv_disk.counts import Counting
from ropewalk.model_runtime.engine.kv_disk.files import folder as folder_module
from ropewalk.model_runtime.engine.kv_disk.files.folder import FolderStore
from ropewalk.model_runtime.engine.kv_disk.files.page_file import PageFormat
from ropewalk.server import cache_command
from tests.servers.processes import run_here

FORM = PageFormat(bytes(32), 64, 3, "bfloat16", keys_by_token=False, num_bytes=2**20 - 128)
PAGE = memoryview(bytes(FORM.num_bytes))


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    """A folder with two pages."""
    made = FolderStore(tmp_path / "kv", FORM, 1 << 30, Counting())
    for number in range(2):
        made.put(bytes([number]) * 32, PAGE)
    return made


def is_there(folder: FolderStore, key: bytes) -> bool:
    return folder.get(key, memoryview(bytearray(FORM.num_bytes)))


def test_clear_leaves_the_file_that_a_server_writes(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write ends well, so the server's writes do not pause."""
    is_written, goes_on = threading.Event(), threading.Event()
    write_page = folder_module.write_page

    def slow(*parts: Any) -> None:
        write_page(*parts)
        is_written.set()
        goes_on.wait(60)

    monkeypatch.setattr(folder_module, "write_page", slow)
    writer = threading.Thread(target=folder.put, args=(b"2" * 32, PAGE))
    writer.start()
    assert is_written.wait(60)
    shown = run_here("cache", "clear", str(folder.path))
    goes_on.set()
    writer.join()
    assert shown.stdout == "deleted 2 pages, 2 MiB\n"
    assert [is_there(folder, key) for key in (bytes(32), b"2" * 32)] == [False, True]


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    """No usage lines stand before it, and it is not made."""
    for action in ("stats", "clear"):
        shown = run_here("cache", action, str(tmp_path / "none"))
        assert shown.returncode == 1
        assert shown.stderr == f"Error: there is no folder {tmp_path / 'none'}\n"
    assert not (tmp_path / "none").exists()


def test_clear_waits_for_the_janitor_of_a_server(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that counts files must not meet one that deletes them all."""
    with (folder.path / ".janitor").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def sleep(_: float) -> None:
            assert is_there(folder, bytes(32))
            fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(cache_command.time, "sleep", sleep)
        assert run_here("cache", "clear", str(folder.path)).returncode == 0
        assert not is_there(folder, bytes(32))
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(cache_command, "_SWEEP_S", -1.0)
        shown = run_here("cache", "clear", str(folder.path))
    assert shown.returncode == 1
    assert f"cannot clear {folder.path}: a server has been sweeping it" in shown.stderr
