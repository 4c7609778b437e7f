"""The release of this package and the commit that it was made from, also if it runs from source.

setup.py runs this file by itself, so it imports nothing that is not Python's own.
"""

import os
import subprocess
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).parents[2]  # a clone, or the folder of installed packages
COMMIT_FILE = "commit.txt"  # beside this file in a wheel and in an archive of the sources
_DESCRIBE = ("git", "--no-optional-locks", "describe", "--always", "--abbrev=12", "--dirty")
_NO_TAGS = ("--exclude", "*")  # a tag's name would stand in front of the commit
_GIT_S = 10.0
_START_S = 1.0  # on a slow file system, a server starts without its commit


@cache
def own_version() -> str:
    """Return the version of the installed package, or of the pyproject.toml beside it."""
    try:
        return version("ropewalk")
    except PackageNotFoundError:
        pyproject = _ROOT / "pyproject.toml"
        stated: str = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"]
        return stated


@cache
def own_commit() -> str | None:
    """Return the commit of the running code as git abbreviates it, or None if nothing tells it.

    It ends in `-dirty` if files of a clone differ from the commit.
    """
    found = commit_of_clone(_ROOT, _START_S)
    if found is not None:
        return found
    kept = Path(__file__).with_name(COMMIT_FILE)
    return kept.read_text(encoding="utf-8").strip() if kept.is_file() else None


def version_and_commit() -> str:
    """Return both for a reader, such as `0.2.0 (commit 4f2a90c1d3b7)`."""
    return f"{own_version()} (commit {own_commit() or 'unknown'})"


def commit_of_clone(root: Path, seconds: float = _GIT_S) -> str | None:
    """Return the commit that is checked out in the clone at `root`.

    Return None if `root` is no clone, or git is missing, refuses to read it, or needs more than
    `seconds`. A folder inside of another project's clone is none.
    """
    if not (root / ".git").exists():
        return None
    # A hook's variables would lead git to the clone of the hook.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        ended = subprocess.run(  # noqa: S603  # a constant
            [*_DESCRIBE, *_NO_TAGS],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()
