"""A fault of the device costs the case that made it, and no other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import pytest, torch
from tests.doubles.device_faults import end_if_the_device_failed

@pytest.fixture(autouse=True)
def _device_works(monkeypatch, request):
    def synchronize():
        if request.node.name == "test_2":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    yield
    end_if_the_device_failed()
"""
CASES = "".join(f"def test_{number}(): pass\n" for number in range(6))


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run six cases, of which the third breaks the device."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_cases.py").write_text(CASES)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *options, "."],
        # A run of its own, even if this test is a worker's.
        env={
            **{name: each for name, each in os.environ.items() if "XDIST" not in name},
            "PYTHONPATH": str(ROOT),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_a_worker_is_replaced(tmp_path: Path) -> None:
    """The other cases pass, on a new worker from then on, and the third is named."""
    pytest.importorskip("xdist")
    ended = run(tmp_path, "-n", "1", "--dist", "load")
    assert "crashed while running 'test_cases.py::test_2'" in ended.stdout
    assert "1 failed, " in ended.stdout


@pytest.mark.long
def test_without_workers_the_run_ends_with_the_reason(tmp_path: Path) -> None:
    """Later cases would fail for a reason that is not theirs."""
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert "no later case can run on it: CUDA error: an illegal" in ended.stdout + ended.stderr
