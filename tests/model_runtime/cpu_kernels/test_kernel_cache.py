"""A cache that cannot be written or read costs a compilation, never a start."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from numba.core.caching import IndexDataCacheFile

from ropewalk.model_runtime.cpu_kernels import jit as compiled
from ropewalk.model_runtime.cpu_kernels.jit import jit

ROOT = Path(compiled.__file__).parents[2]
SCRIPT = """
from ropewalk.model_runtime.cpu_kernels.jit import jit

def doubled(x):
    return 2 * x

print("doubled", jit()(doubled)(4.0))
"""


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The log lines of a test whose kernels are kept in `tmp_path`."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_told", set())
    monkeypatch.setattr(compiled, "_kept", set())
    with structlog.testing.capture_logs() as lines:
        yield lines


def kernel(name: str) -> Any:
    """A new kernel that doubles; its name tells it apart."""

    def doubled(x: float) -> float:
        return 2 * x if len(name) < 9 else x

    return jit()(doubled)


def hits_of_two_kernels() -> int:
    """Compile or find two kernels, call them, and return how many were found."""
    kernels = [kernel("one"), kernel("two")]
    assert [each(4.0) for each in kernels] == [8.0, 8.0]
    return sum(sum(each.stats.cache_hits.values()) for each in kernels)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system in memory, if root may mount one; else the test is skipped."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("only root may mount a tmpfs")
    if subprocess.call([mount, "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]) != 0:
        pytest.skip("this root may not mount a tmpfs")
    try:
        yield
    finally:
        subprocess.check_call([umount, str(folder)])


def run_kernel(script: Path, folder: Path) -> list[str]:
    """Run a kernel in a process of its own, kept in this folder; return the lines it prints."""
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def kept_files(folder: Path, ending: str) -> list[Path]:
    """The index files (nbi) or the files of code (nbc)."""
    return sorted(folder.rglob(f"*.{ending}"))


def test_a_failed_save_is_one_warning(logged: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel fails to be saved, is compiled and gives its result."""

    def full(self: Any, overloads: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexDataCacheFile, "_save_index", full)
    assert hits_of_two_kernels() == 0
    assert hits_of_two_kernels() == 0
    [line] = logged
    assert (line["log_level"], line["event"]) == ("warning", "kernels_not_kept")
    assert line["reason"] == "No space left on device"
    assert "NUMBA_CACHE_DIR" in line["remedy"]
    assert compiled.num_kept() == 0


@pytest.mark.parametrize(("ending", "size"), [("nbi", 0), ("nbi", -1), ("nbc", 1), ("nbc", -1)])
def test_a_damaged_file_is_compiled_again_and_renewed(
    tmp_path: Path, logged: list[Any], ending: str, size: int
) -> None:
    """A file that lost its end is one warning, and the file is whole after the next start."""
    assert hits_of_two_kernels() == 0
    damaged = kept_files(tmp_path, ending)
    assert len(damaged) == 2
    for path in damaged:
        path.write_bytes(path.read_bytes()[:size])
    assert hits_of_two_kernels() == 0
    [line] = logged
    assert (line["log_level"], line["event"]) == ("warning", "kernel_cache_damaged")
    assert hits_of_two_kernels() == 2
    assert len(logged) == 1


def test_code_with_a_changed_byte_is_not_run(tmp_path: Path, logged: list[Any]) -> None:
    """The file can be unpickled, so only its seal shows the damage."""
    assert hits_of_two_kernels() == 0
    for path in kept_files(tmp_path, "nbc"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert hits_of_two_kernels() == 0
    assert [line["event"] for line in logged] == ["kernel_cache_damaged"]


def test_old_code_under_a_new_index_is_not_run(
    tmp_path: Path, logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up after the index was written leaves the code of older sources there."""
    assert hits_of_two_kernels() == 0
    old = {path: path.read_bytes() for path in kept_files(tmp_path, "nbc")}
    monkeypatch.setattr(compiled, "_FINGERPRINT", "another")
    assert hits_of_two_kernels() == 0
    for path, content in old.items():
        assert path.read_bytes() != content
        path.write_bytes(content)
    assert hits_of_two_kernels() == 0
    assert compiled.num_kept() == len(kept_files(tmp_path, "nbc")) == 2
    assert hits_of_two_kernels() == 2


def test_without_any_folder_kernels_are_compiled_and_not_kept(
    logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba finds no folder for the function, which used to end the import."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert hits_of_two_kernels() == 0
    [line] = logged
    assert (line["event"], line["reason"]) == ("kernels_not_kept", "no folder can be written")


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are then kept beside their sources, and the warning says where and why."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "file" / "numba"))
    jit()(lambda x: x)
    [line] = logged
    assert (line["event"], line["reason"]) == ("kernel_cache_elsewhere", "Not a directory")
    assert line["NUMBA_CACHE_DIR"] == str(tmp_path / "file" / "numba")
    assert line["folder"].startswith(str(Path(__file__).parent))


def test_a_full_disk_does_not_end_a_process(tmp_path: Path) -> None:
    """The disk is a tmpfs of 64 KiB with one page left, which the machine code fills."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "size=64k"):
        (disk / "filler").write_bytes(bytes(60 << 10))
        lines = run_kernel(tmp_path / "script.py", disk / "numba")
    assert lines[-1] == "doubled 8.0"
    assert len(lines) == 2
    assert "kernels_not_kept" in lines[0]
    assert "No space left on device" in lines[0]


def test_a_read_only_folder_does_not_end_a_process(tmp_path: Path) -> None:
    """For root the file system is read-only, because root may write to any folder."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with ExitStack() as stack:
        if os.geteuid() == 0:
            stack.enter_context(mounted(disk, "ro"))
        else:
            disk.chmod(0o555)
        lines = run_kernel(tmp_path / "script.py", disk / "numba")
    assert lines[-1] == "doubled 8.0"
    assert len(lines) == 2
    assert "kernel_cache_elsewhere" in lines[0]
    assert str(disk / "numba") in lines[0]
