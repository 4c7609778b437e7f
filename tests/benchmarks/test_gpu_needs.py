"""A machine with a GPU that lacks a package gets one message at once, without a traceback."""

import shlex
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from benchmarks.gpu import needs

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def test_a_bare_python_is_told_all_that_it_lacks() -> None:
    """Python runs with -S, so installed packages are not found."""
    command = [sys.executable, "-S", "-m", "benchmarks.gpu.needs"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    for name in ("structlog", "llguidance (1.9 or newer)", "torch", "triton", "pytest"):
        assert name in ended.stderr
    assert "fastapi" not in ended.stderr


def package(folder: Path, name: str, code: str) -> None:
    """Write a module."""
    (folder / f"{name}.py").write_text(code)


def test_packages_are_imported_and_not_only_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has a version, one raises, one ends the process; those after it are not judged."""
    package(tmp_path, "aa", "__version__ = '2.5'")
    package(tmp_path, "bb", "raise RuntimeError('needs NumPy 2.4 or less')")
    package(tmp_path, "cc", "import os; os._exit(7)")
    package(tmp_path, "dd", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert needs.imports({"aa", "bb", "cc", "dd", "ee"}) == {
        "aa": ("2.5", None),
        "bb": ("", "RuntimeError: needs NumPy 2.4 or less"),
        "cc": ("", "Python ended with code 7"),
    }


def test_the_wheels_are_complete() -> None:
    """All that a listed package requires is listed, or comes with torch and transformers."""
    from packaging.requirements import Requirement

    found = needs.wheels()
    here = {"fastapi", "pydantic-core", "starlette", "annotated-types", "opentelemetry-api"}
    assert here | {"structlog", "llguidance", "httpx", "typing-extensions"} <= set(found)
    assert not {"torch", "numpy", "numba", "transformers", "triton"} & set(found)
    environment = {"python_version": "3.12", "extra": ""}
    for name in found:
        for line in requires(name) or []:
            asked = Requirement(line)
            if asked.marker is None or asked.marker.evaluate(environment):
                known = asked.name.lower().replace("_", "-")
                assert known in found or known in needs._GIVEN, f"{name} requires {line}"
                if known in found:
                    assert asked.specifier.contains(found[known]), f"{name} requires {line}"


def test_the_check_runs_without_plugins_of_pytest() -> None:
    """Pytest would refuse an option by name without its plugin."""
    said = subprocess.run(
        ["make", "-n", "gpu-check", f"GPU_PYTHON={sys.executable}"],  # noqa: S607
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    line = next(each for each in said.stdout.replace("\\\n", " ").splitlines() if "pytest" in each)
    # The shell's `NAME=value` before a command is that of `env`, too.
    command = [
        "env",
        *shlex.split(line),
        "-p",
        "no:timeout",
        "-p",
        "no:randomly",
        "--collect-only",
        "-q",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "test_a_read_equals_float64" in ended.stdout
