"""Trials of the kernels that decide how later processes compute."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ropewalk.model_runtime import known_trials
from ropewalk.model_runtime.cpu_kernels import trials
from ropewalk.model_runtime.known_trials import arithmetic_hash, kept_folder, remembered


@pytest.mark.parametrize("first", [False, True])
def test_a_processor_that_was_timed_is_not_timed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, first: bool
) -> None:
    """Else a busy moment could give the next process other products, and other bits."""
    found = iter([first, not first])
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trials, "HAS_PAIR_PRODUCTS", True)
    monkeypatch.setattr(trials, "_are_pairs_faster", lambda: next(found))
    pays = trials.pairs_pay.__wrapped__  # as in a process of its own
    assert [pays(), pays()] == [first, first]
    (file,) = tmp_path.glob("ropewalk-trial-*.json")
    file.write_text("no JSON")
    assert pays() != first


def test_processes_that_try_at_once_follow_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else replicas that start together could have other bits than each other."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def late() -> str:
        """Find a result while another process finds one."""
        return "late" if remembered("t", lambda: "early") else ""

    assert remembered("t", late) == "early"
    assert remembered("t", lambda: "third") == "early"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_result_is_kept_in_the_users_cache_if_the_package_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each process would try anew, and could compute other bits than the one before it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    monkeypatch.setattr(known_trials, "_ROOT", tmp_path / "file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert [remembered("t", lambda: "first"), remembered("t", lambda: "second")] == ["first"] * 2
    assert len(list((tmp_path / "cache" / "ropewalk").iterdir())) == 1


def test_a_folder_that_may_not_be_searched_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start may not fail for it."""
    closed = tmp_path / "closed"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(closed / "kernels"))
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    closed.mkdir()
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != closed)
    assert not kept_folder().is_relative_to(closed)


def test_only_what_decides_bits_is_in_the_hash_of_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal processors differ in their number, speed and microcode."""
    told = "vendor_id\t: V\nmodel\t\t: 1\nflags\t\t: fma avx2\nmicrocode\t: 0x1\nbogomips\t: 1.5\n"
    shown = told
    real = Path.read_text

    def read(path: Path, **options: Any) -> str:
        return shown if path == Path("/proc/cpuinfo") else real(path, **options)

    monkeypatch.setattr(Path, "read_text", read)
    expected = arithmetic_hash()
    shown = told.replace("0x1", "0x2").replace("1.5", "1.6") + "apicid\t: 4\n"
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    assert arithmetic_hash() == expected
    shown = told.replace("avx2", "avx512f")
    assert arithmetic_hash() != expected
    shown = told
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert arithmetic_hash() != expected
