"""The environment that a command sets before torch is imported."""

import os
import subprocess
import sys

import pytest

from ropewalk.server.process.preflight import use_huge_pages, wait_briefly

_PROGRAM = """
from ropewalk.server.process.preflight import bound_memory, wait_briefly
bound_memory()
wait_briefly()
import torch
from tests.model_runtime.cpu_kernels.test_huge_pages import is_advised
small, large = torch.zeros(1 << 10), torch.zeros(1 << 22)  # not in the place of a freed large one
middle = [each.data_ptr() + 2 * len(each) for each in (large, small)]
print(*map(is_advised, middle))
"""


@pytest.fixture(scope="module")
def started() -> subprocess.CompletedProcess[str]:
    """A process that imports torch as a command does; its OpenMP tells its environment."""
    others = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    quiet = {name: value for name, value in os.environ.items() if name not in others}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**quiet, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_environment_may_say_otherwise() -> None:
    """A variable that the environment sets stays, and no other is added."""
    for said in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(said)
        wait_briefly(environment)
        assert environment == said
    environment = {}
    wait_briefly(environment)
    assert environment == {"GOMP_SPINCOUNT": "1000"}


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
def test_torchs_openmp_takes_it(started: subprocess.CompletedProcess[str]) -> None:
    """The variable is set before torch's OpenMP reads it."""
    shown = started.stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("this build of torch has another OpenMP library")
    assert "GOMP_SPINCOUNT = '1000'" in shown


def test_an_environment_without_huge_pages_stays() -> None:
    environment = {"THP_MEM_ALLOC_ENABLE": "0"}
    use_huge_pages(environment)
    assert environment == {"THP_MEM_ALLOC_ENABLE": "0"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has huge pages")
def test_large_tensors_of_torch_ask_for_huge_pages(
    started: subprocess.CompletedProcess[str],
) -> None:
    """The variable is set before torch reads it, and torch knows it."""
    assert started.stdout.split() == ["True", "False"]
