"""Replicas where the extra is not installed."""

import subprocess
import sys

_COMMAND = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from ropewalk.cli import ropewalk
ropewalk(["serve", "--port", "0", "--replicas", "2"])
"""


def test_replicas_without_ray_are_one_sentence() -> None:
    """It names the extra, and the code is 2."""
    ended = subprocess.run(
        [sys.executable, "-c", _COMMAND], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "ropewalk: replicas needs Ray: pip install 'ray[serve]>=2.60', got 2"
    )
    assert "Traceback" not in ended.stderr
