"""`python -m benchmarks.gpu.needs`: the packages that the GPU's make targets miss in this Python.

A machine with a GPU has its own Python, and no network to install packages from. So the targets
first print all missing packages in one sentence. Packages are also imported, in another process,
because an installed package may not load beside the others. With `--wheels`, an environment that
serves prints what to carry to such a machine.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PYPROJECT = _ROOT / "pyproject.toml"
# The packages of the extra `dev` that the targets need.
_FROM_DEV = frozenset({"pytest", "pytest-xdist", "triton"})
# Packages that only the server needs (gpu.md).
_SERVING = frozenset(
    {"fastapi", "httpx", "prometheus-client", "pydantic", "pydantic-settings", "uvicorn"}
)
# Packages for a model on the CPU.
_OTHER_WAYS = frozenset({"llvmlite", "numba"})
# Packages that a machine with a GPU has, in releases that fit each other and its driver.
_GIVEN = frozenset({"numpy", "pytest", "pytest-xdist", "torch", "triton"}) | frozenset(
    {"huggingface-hub", "safetensors", "tokenizers", "transformers"}
)
# A package's name -> its module's, if they differ.
_MODULES = {"pytest-xdist": "xdist", "pyyaml": "yaml"}
_TARGET = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}
_SERVER = "import ropewalk.server.startup.app, ropewalk.studies.bench.load"
_IMPORT_EACH = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        module, fault = importlib.import_module(name), None
    except BaseException as error:
        module, fault = None, f"{type(error).__name__}: {error}"
    found = getattr(module, "__version__", None)
    print(json.dumps([name, str(found) if found else "", fault]), flush=True)
"""


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


def shortcomings(needed: Mapping[str, str]) -> list[str]:
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


def imports(packages: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """Return package -> its version and why it does not load, if so; imported in a subprocess."""
    modules = {_MODULES.get(name, name.replace("-", "_")): name for name in sorted(packages)}
    command = [sys.executable, "-c", _IMPORT_EACH, *modules]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    found = {modules[module]: (number, fault) for module, number, fault in told}
    crash = f"Python ended with code {ended.returncode}"
    # After a crash, only the first of the packages without an answer is at fault.
    for name in modules.values():
        if name not in found:
            found[name] = ("", crash)
            break
    return found


def lacks_to_serve() -> list[str]:
    """Return phrases for what keeps the server and its client from being imported here."""
    needed = requirements()
    missing = shortcomings({name: needed[name] for name in _SERVING})
    if missing:
        return missing
    command = [sys.executable, "-c", _SERVER]
    ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    return [] if ended.returncode == 0 else [_last_line(ended.stderr)]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def wheels() -> dict[str, str]:
    """Return package -> version of the wheels that a machine with torch and transformers lacks.

    They are all that this project requires, and all that those require, by the metadata of the
    packages installed here, for the target's Python. The machine may have some of them. The carried
    ones are then found first.
    """
    kept = _GIVEN | _OTHER_WAYS
    waiting = [name for name in map(_normalised, requirements()) if name not in kept]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        found[name] = version(name)
        waiting += {each for each in _required(name) if each not in found} - kept
    return dict(sorted(found.items()))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required(name: str) -> Iterator[str]:
    """Yield the packages that an installed package requires in the target's Python."""
    from packaging.requirements import Requirement  # noqa: PLC0415  # not in a bare Python

    for line in requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(_TARGET):
            yield _normalised(requirement.name)


def main() -> None:
    """Print versions and what is missing; exit with code 2 unless only the server needs it."""
    if sys.argv[1:] == ["--wheels"]:
        sys.stdout.write("".join(f"{name}=={number}\n" for name, number in wheels().items()))
        return
    needed = requirements()
    always = {name: needed[name] for name in needed.keys() - _SERVING - _OTHER_WAYS}
    where = f"{sys.executable} lacks"
    found = shortcomings(always)
    if found:
        sys.stderr.write(f"{where} {', '.join(found)}. benchmarks/gpu.md says what is needed.\n")
        sys.exit(2)
    loaded = imports(needed.keys() - _SERVING)
    told = [f"{name} {number}" for name, (number, fault) in loaded.items() if not fault]
    sys.stdout.write(f"{', '.join(told)}\n")
    faults = {name: fault for name, (_, fault) in loaded.items() if fault}
    broken = [f"{name} ({fault})" for name, fault in faults.items() if name not in _OTHER_WAYS]
    if broken:
        sys.stderr.write(f"{sys.executable} cannot import {', '.join(broken)}.\n")
        sys.exit(2)
    if faults:
        spared = ", ".join(f"{name} ({fault})" for name, fault in faults.items())
        sys.stderr.write(f"{where} {spared}: no model runs on its CPU, all else does.\n")
    found = lacks_to_serve()
    if found:
        sys.stderr.write(f"{where} {', '.join(found)}: no server runs with it, all else does.\n")


if __name__ == "__main__":
    main()
