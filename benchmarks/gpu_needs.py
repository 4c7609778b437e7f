"""`python -m benchmarks.gpu_needs`: the packages that the GPU's make targets miss in this Python.

A machine with a GPU has its own Python, and no network to install packages from. So the targets
first print all missing packages in one sentence. This module imports none of them.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
_FROM_DEV = frozenset({"pytest", "triton"})  # the packages of the extra `dev` that the targets need
# Packages that only the server needs (gpu.md).
_SERVING = frozenset(
    {"fastapi", "httpx", "prometheus-client", "pydantic", "pydantic-settings", "uvicorn"}
)


def requirements() -> dict[str, str]:
    """Return package -> oldest allowed release, from pyproject.toml."""
    project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(line for line in project["optional-dependencies"]["dev"] if _name(line) in _FROM_DEV),
    ]
    return {_name(line): _release(line.partition(";")[0]) for line in lines}


def _name(line: str) -> str:
    found = re.match(r"[\w.-]+", line)
    assert found is not None, line
    return found[0]


def _release(line: str) -> str:
    _, asked, release = line.partition(">=")
    assert asked, f"{line} has no lower bound"
    return release.strip()


def shortcomings(needed: dict[str, str]) -> list[str]:
    """Return a phrase for each package that is missing or too old, in the order of names."""
    found = []
    for name, least in sorted(needed.items()):
        try:
            installed = version(name)
        except PackageNotFoundError:
            found.append(f"{name} ({least} or newer)")
            continue
        if _numbers(installed) < _numbers(least):
            found.append(f"{name} {least} or newer (it has {installed})")
    return found


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers to compare by, without the part after a plus, which names the build."""
    return tuple(map(int, re.findall(r"\d+", release.partition("+")[0])))


def lacks_to_serve() -> list[str]:
    """Return phrases for the packages that only the server needs and that are missing."""
    needed = requirements()
    return shortcomings({name: needed[name] for name in _SERVING})


def main() -> None:
    """Print what is missing; exit with code 2 unless only the server needs it."""
    needed = requirements()
    for name in _SERVING:
        del needed[name]
    where = f"{sys.executable} lacks"
    found = shortcomings(needed)
    if found:
        sys.stderr.write(f"{where} {', '.join(found)}. benchmarks/gpu.md says what is needed.\n")
        sys.exit(2)
    found = lacks_to_serve()
    if found:
        sys.stderr.write(f"{where} {', '.join(found)}: no server runs with it, all else does.\n")


if __name__ == "__main__":
    main()
