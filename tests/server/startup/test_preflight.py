"""The environment that a command sets before torch is imported."""

import os
import subprocess
import sys

import pytest

from ropewalk.server.process.preflight import wait_briefly

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


def test_the_environment_may_say_otherwise() -> None:
    """A variable that the environment sets stays, and no other is added."""
    for said in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(said)
        wait_briefly(environment)
        assert environment == said
    environment = {}
    wait_briefly(environment)
    assert environment == {"GOMP_SPINCOUNT": "1000"}


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp and huge pages are Linux's")
def test_torch_takes_both() -> None:
    """The variables are set before torch and its OpenMP read them; OpenMP tells its environment."""
    others = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    quiet = {name: value for name, value in os.environ.items() if name not in others}
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**quiet, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split() == ["True", "False"]
    if "GOMP_SPINCOUNT" in ended.stderr:  # else this build of torch has another OpenMP library
        assert "GOMP_SPINCOUNT = '1000'" in ended.stderr
