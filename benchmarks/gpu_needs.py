"""`python -m benchmarks.gpu_needs` says what `make gpu-check` and `gpu-bench` miss in this Python.

A machine with a GPU has its own Python, and no network to fetch what it lacks. So that is said
first, all at once, in a sentence. Imports nothing that might be what is missing.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
_FROM_DEV = frozenset({"pytest", "triton"})  # of what else is only for developers, nothing
# What is imported to serve, and for nothing else: gpu.md.
_SERVING = frozenset(
    {"fastapi", "httpx", "prometheus-client", "pydantic", "pydantic-settings", "uvicorn"}
)


def requirements() -> dict[str, str]:
    """Package -> the oldest release that will do, as pyproject.toml has them."""
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
    """What is missing of it or too old, in words, by name."""
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
    """To compare by; what stands behind a plus says how it was built."""
    return tuple(map(int, re.findall(r"\d+", release.partition("+")[0])))


def lacks_to_serve() -> list[str]:
    """What the server needs beside all else, and is not there."""
    needed = requirements()
    return shortcomings({name: needed[name] for name in _SERVING})


def main() -> None:
    """Say what is missing; end with code 2 unless it is only for serving."""
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
