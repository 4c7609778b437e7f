"""The locks of what a server needs at run time, with hashes: `make lock` writes them again.

`requirements.lock` is the tested set, developers' packages included. The files in locks/ hold the
same versions with the hashes of their files, and only what a server needs:

- build.lock: what makes the wheel.
- torch.lock: torch, and CUDA's libraries for Linux.
- runtime.lock: everything else. With it, torch may come from another index.
- EXTRA.lock: what an extra needs beside both.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = tuple(sorted({*PROJECT["project"]["optional-dependencies"]} - {"dev"}))
# The first Python that is served; markers cover later ones.
_PYTHON = ".".join(PROJECT["project"]["requires-python"].removeprefix(">=").split(".")[:2])
_OF_TORCH = re.compile(r"torch|triton|(nvidia|cuda)-.*")
_ENTRY = re.compile(r"^(\S+)==(?:.*\\\n)+.*\n", re.MULTILINE)


def entries(text: str) -> dict[str, str]:
    """Return the entries of a lock by the package's name, each with its hashes."""
    return {found[1]: found[0] for found in _ENTRY.finditer(text)}


def compiled(uv: str, *sources: str) -> dict[str, str]:
    """Return the entries that uv finds for requirements, with the versions of the tested set."""
    command = [uv, "pip", "compile", *sources, "--constraint", "requirements.lock"]
    command += ["--universal", "--python-version", _PYTHON, "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--quiet", "--no-config"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(ended.stderr)
    return entries(ended.stdout)


def written(uv: str) -> Mapping[str, str]:
    """Return the text of each lock by its name."""
    served = compiled(uv, "pyproject.toml")
    of_torch = {name for name in served if _OF_TORCH.fullmatch(name)}
    with tempfile.NamedTemporaryFile("w", suffix=".in") as build:
        build.write("\n".join(PROJECT["build-system"]["requires"]))
        build.flush()
        found = {"build": compiled(uv, build.name)}
    found["torch"] = {name: text for name, text in served.items() if name in of_torch}
    found["runtime"] = {name: text for name, text in served.items() if name not in of_torch}
    for extra in EXTRAS:
        beside = compiled(uv, "pyproject.toml", "--extra", extra)
        found[extra] = {name: text for name, text in beside.items() if name not in served}
    head = "# Made by `make lock` from pyproject.toml and requirements.lock; tests/locks.py.\n"
    return {name: head + "".join(each.values()) for name, each in found.items()}


def main() -> None:
    """Write all locks with the uv that the command line names."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in written(sys.argv[1]).items():
        (FOLDER / f"{name}.lock").write_text(text)


if __name__ == "__main__":
    main()
