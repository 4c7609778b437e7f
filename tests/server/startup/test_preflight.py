"""Threads that wait for each other sleep before they cost another thread its core."""

import os
import subprocess
import sys

import pytest

from ropewalk.server.process.preflight import wait_briefly

_SHOW = "from ropewalk.server.process.preflight import wait_briefly; wait_briefly(); import torch"


def test_the_environment_may_say_otherwise() -> None:
    """A variable that the environment sets stays, and no other is added."""
    for said in ({"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}):
        environment = dict(said)
        wait_briefly(environment)
        assert environment == said
    environment = {}
    wait_briefly(environment)
    assert environment == {"GOMP_SPINCOUNT": "1000"}


@pytest.mark.costly
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is Linux's")
def test_torchs_openmp_takes_it() -> None:
    """The variable is set before torch's OpenMP reads it."""
    quiet = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    shown = subprocess.run(
        [sys.executable, "-c", _SHOW],
        env={**quiet, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("this build of torch has another OpenMP library")
    assert "GOMP_SPINCOUNT = '1000'" in shown
