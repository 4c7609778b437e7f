"""The command runs our own packages, whatever other packages have the same names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# As the installed script does: our folder is on the path, but after the foreign one.
_SCRIPT = f"import sys; sys.path.append({str(ROOT)!r}); from ropewalk.__main__ import main; main()"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder of packages with our names, which end the process when they are imported."""
    for name in ("server", "rope", "model_runtime"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('foreign code ran')\n")
    (tmp_path / "server" / "__main__.py").write_text("def main():\n    print('foreign main')\n")
    (tmp_path / "server" / "settings.py").write_text("print('foreign settings')\n")
    (tmp_path / "ok.yaml").write_text("max_num_seqs: 8\n")
    return tmp_path


def run(folder: Path, program: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the folder first on the path."""
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments", [("--version",), ("serve", "--help"), ("config", "check", "ok.yaml")]
)
def test_foreign_packages_are_not_run(foreign: Path, arguments: tuple[str, ...]) -> None:
    """They are in the current directory and on PYTHONPATH."""
    ended = run(foreign, ["-c", _SCRIPT], *arguments)
    assert ended.returncode == 0, ended.stderr
    assert "foreign" not in ended.stdout + ended.stderr
    assert "ropewalk" in ended.stdout or "deployment" in ended.stdout


def test_the_command_is_a_module_too(foreign: Path) -> None:
    """`python -m ropewalk` finds our packages like the installed command."""
    program = ["-c", f"import sys, runpy; sys.path.append({str(ROOT)!r}); {_RUN_MODULE}"]
    ended = run(foreign, program, "--version")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("ropewalk, version ")
    ended = run(ROOT, ["-m", "ropewalk"], "--help")
    assert ended.stdout.startswith("Usage: ropewalk ")


_RUN_MODULE = "runpy.run_module('ropewalk', run_name='__main__', alter_sys=True)"


def test_a_package_that_was_imported_before_is_a_sentence(foreign: Path) -> None:
    """A .pth file may import a foreign package before the command begins."""
    (foreign / "server" / "__init__.py").write_text("")
    ended = run(foreign, ["-c", f"import ropewalk.server; {_SCRIPT}"], "--version")
    assert ended.returncode == 2
    found, own = foreign / "server", ROOT / "server"
    assert f"imported the package 'server' from {found}, not from {own}" in ended.stderr
    assert "virtual environment of its own" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
