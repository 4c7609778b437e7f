"""A release is known by its number, whether it is installed or not."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from server import version as version_module

ROOT = Path(__file__).parents[2]


def test_sources_that_were_never_installed_know_their_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has only a checkout, so the package's metadata is missing."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version_module, "version", missing)
    found = version_module.own_version()
    command = [sys.executable, "-m", "server", "--version"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told == f"ropewalk, version {found}\n"
