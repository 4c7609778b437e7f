"""Trials of the kernels that decide how later processes compute."""

from pathlib import Path

import pytest

from ropewalk.model_runtime import known_trials
from ropewalk.model_runtime.cpu_kernels import trials
from ropewalk.model_runtime.known_trials import remembered


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
