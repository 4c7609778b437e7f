"""A machine with a GPU that lacks a package gets one message at once, without a traceback."""

import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from benchmarks import gpu_needs

ROOT = Path(__file__).parents[2]


def test_a_bare_python_is_told_all_that_it_lacks() -> None:
    """Python runs with -S, so installed packages are not found."""
    command = [sys.executable, "-S", "-m", "benchmarks.gpu_needs"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    for name in ("structlog", "llguidance (1.9 or newer)", "torch", "triton", "pytest"):
        assert name in ended.stderr
    assert "fastapi" not in ended.stderr


def test_what_is_too_old_is_named_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of one release count as that release."""
    installed = {"torch": "2.9.1+cu130", "triton": "3.6.0", "numba": "0.100.0", "click": "8.1.0rc1"}
    monkeypatch.setattr(gpu_needs, "version", installed.__getitem__)
    needed = {"torch": "2.11", "triton": "3.6", "numba": "0.60", "click": "8.1"}
    assert gpu_needs.shortcomings(needed) == ["torch 2.11 or newer (it has 2.9.1+cu130)"]


def test_what_only_a_server_needs_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages that only a server needs are named, but stop nothing."""

    def version(name: str) -> str:
        if name in {"uvicorn", "fastapi"}:
            raise PackageNotFoundError(name)
        return "9999"

    monkeypatch.setattr(gpu_needs, "version", version)
    gpu_needs.main()
    told = capsys.readouterr().err
    assert "fastapi" in told
    assert "uvicorn" in told
    assert "no server runs" in told


def test_the_check_runs_without_plugins_of_pytest() -> None:
    """Pytest would refuse an option by name without its plugin."""
    said = subprocess.run(
        ["make", "-n", "gpu-check", f"GPU_PYTHON={sys.executable}"],  # noqa: S607
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    line = next(each for each in said.stdout.replace("\\\n", " ").splitlines() if "pytest" in each)
    command = [*shlex.split(line), "-p", "no:timeout", "-p", "no:randomly", "--collect-only", "-q"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "test_a_read_equals_float64" in ended.stdout
