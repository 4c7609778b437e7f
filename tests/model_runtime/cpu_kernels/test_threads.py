"""Calls of compiled kernels on several threads."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.threads import (
    MOST_THREADS,
    barrier_wait,
    even_shares,
    num_threads_for,
    run_items,
    run_on_threads,
    run_shares,
)

SIZES = (1, 2, 5)


@jit()
def add_to(numbers: Any, pair: Any, begin: int, end: int) -> None:
    """Add the product of two numbers to a part of an array."""
    for at in range(begin, end):
        numbers[at] += pair[0] * pair[1]


@jit()
def mark(items: Any, marks: Any, mark: int) -> None:
    """Mark work items."""
    for item in items:
        marks[item] += mark


@jit()
def double_the_sum(  # noqa: PLR0917
    thread: int, num_threads: int, arrived: Any, given: Any, sums: Any, failing: int
) -> None:
    """Write twice what the thread before was given; the thread `failing` has no memory."""
    if thread == failing:
        raise MemoryError
    sums[thread] = given[thread]
    barrier_wait(arrived, 1, num_threads)
    given[thread] = 2.0 * sums[thread - 1]


def doubled(num_threads: int, failing: int = -1) -> Any:
    """What `double_the_sum` makes of 0, 1, 2 and so on."""
    given, arrived = np.arange(num_threads, dtype=np.float64), np.zeros(1, np.int64)
    arguments = num_threads, arrived, given, np.empty_like(given), failing
    run_on_threads(double_the_sum, num_threads, *arguments, arrived=arrived)
    return given


def run_python(code: str) -> None:
    """Run a program that has to end with code 0."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("num_threads", SIZES)
def test_each_share_is_computed_once(num_threads: int) -> None:
    numbers = np.zeros(1000)
    for _ in range(20):
        run_shares(add_to, even_shares(1000, 8, num_threads), numbers, (0.5, 4))
    assert np.all(numbers == 40)


@pytest.mark.parametrize("num_threads", SIZES)
def test_each_work_item_is_computed_once(num_threads: int) -> None:
    """A thread may have no item."""
    marks = np.zeros(100, np.int64)
    items = [np.arange(100)[at::num_threads] for at in range(num_threads)]
    run_items(mark, [*items, np.empty(0, np.int64)], marks, 7)
    assert np.all(marks == 7)


@pytest.mark.parametrize("num_threads", SIZES)
def test_a_stage_sees_what_all_threads_wrote(num_threads: int) -> None:
    for _ in range(50):
        assert np.array_equal(doubled(num_threads), 2 * np.roll(np.arange(num_threads), 1))


@pytest.mark.parametrize("failing", range(3))
def test_a_failure_of_any_thread_releases_the_others_and_is_raised(failing: int) -> None:
    """The next call is as if nothing had happened."""
    with pytest.raises(MemoryError, match="no memory"):
        doubled(3, failing)
    assert np.array_equal(doubled(3), [4, 0, 2])


def test_a_thread_that_sleeps_is_woken() -> None:
    doubled(3)
    for seconds in (0.0, 1e-4, 3e-4, 1e-3, 0.05) * 10:
        time.sleep(seconds)
        assert np.array_equal(doubled(3), [4, 0, 2])
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1


def test_a_call_has_no_more_threads_than_there_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 100)
    assert num_threads_for(200) == MOST_THREADS
    numbers = np.zeros(1000)
    run_shares(add_to, even_shares(1000, 1, 100), numbers, (0.5, 4))
    assert np.all(numbers == 2)


def test_more_threads_than_there_can_be_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"at most 64 threads\. Given: 65"):
        doubled(MOST_THREADS + 1)


def test_a_thread_that_cannot_start_is_an_error_and_a_forked_process_has_its_own() -> None:
    """The error leaves no file, and the next call starts the thread."""
    run_python("""
import _thread, os
from tests.model_runtime.cpu_kernels.test_threads import doubled
def refuse(*_):
    raise RuntimeError("can't start new thread")
start, before = _thread.start_new_thread, len(os.listdir("/dev/fd"))
_thread.start_new_thread = refuse
try:
    doubled(3)
except RuntimeError as error:
    assert "start new thread" in str(error)
else:
    raise AssertionError
assert len(os.listdir("/dev/fd")) == before
_thread.start_new_thread = start
assert doubled(3).tolist() == [4, 0, 2]
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(doubled(3).tolist() != [4, 0, 2])
assert doubled(3).tolist() == [4, 0, 2]
""")


def test_a_kernel_that_changes_is_compiled_again(tmp_path: Path) -> None:
    """A kernel outside the sources of the kernels is known by its own code and numbers.

    Each version is compiled by a fork, which knows of the other one by its file only.
    """
    for number in (1, 2):
        (tmp_path / f"version_{number}").write_text(f"""
import numpy as np
from ropewalk.model_runtime.cpu_kernels import threads
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.threads import run_on_threads, run_shares
@jit()
def put(out, begin, end):
    out[begin:end] = {number}
out = np.zeros(2, np.int64)
run_shares(put, [(0, 1), (1, 2)], out)
print(out.tolist(), flush=True)
""")
    code = """
import os, shutil
from ropewalk.model_runtime.cpu_kernels import threads
for number in (1, 2):
    shutil.copy(f"version_{number}", "changing.py")
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        import changing
        os._exit(0)
"""
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=tmp_path, env=variables,
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[1, 1]", "[2, 2]"]


def test_callers_on_several_threads_take_turns() -> None:
    def work(seed: int) -> bool:
        return all(
            np.array_equal(doubled(size), 2 * np.roll(np.arange(size), 1))
            for size in np.random.default_rng(seed).integers(1, 5, 100).tolist()
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
