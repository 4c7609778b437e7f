"""Checks of Python, the packages and torch.

torch is imported in a process of its own, because a broken build may end the process.
"""

import json
import platform
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.process.torch_build import TorchBuild, has_nvidia_gpu, mismatch
from ropewalk.server.wording import counted
from ropewalk.studies.doctor.finding import Finding

_AGAIN = "install ropewalk again into a new virtual environment (docs/guide/install.md)"
_NAMED = ("transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "numba")
_NEWEST_TRIED = (3, 13)
_IMPORT_S = 120
LEAST_CAPABILITY = (8, 0)  # of flash attention, and of what the project compiles for (tests/hopper)
_PROBE = """
import json
import torch
gpus = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gpus.append([found.name, found.total_memory, [found.major, found.minor]])
facts = [torch.__version__, torch.version.cuda, getattr(torch.version, "hip", None), gpus]
print(json.dumps([*facts, torch.get_num_threads()]))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch finds."""

    name: str
    num_bytes: int  # of memory
    capability: tuple[int, int]  # NVIDIA's number for what a card can do


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """A torch that could be imported."""

    build: TorchBuild
    gpus: tuple[Gpu, ...]
    num_threads: int


def check_python() -> Finding:
    """Check the interpreter's version."""
    system = f"{platform.system()} {platform.machine()}"
    text = f"{platform.python_version()} on {system}, {sys.executable}"
    if sys.version_info[:2] > _NEWEST_TRIED:
        return Finding("warn", "python", f"{text}, not tried by this project", "use Python 3.13")
    return Finding("ok", "python", text)


def check_packages() -> Finding:
    """Check that every dependency is installed, and not older than it must be."""
    wrong = []
    for name, least in _requirements():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if _numbers(found) < _numbers(least):
            wrong.append(f"{name} is {found}, and at least {least} is needed")
    if wrong:
        return Finding("fail", "packages", ", ".join(wrong), _AGAIN)
    return Finding(
        "ok", "packages", ", ".join(f"{name} {metadata.version(name)}" for name in _NAMED)
    )


def _requirements() -> list[tuple[str, str]]:
    """Return the dependencies but torch, with their lower bounds."""
    try:
        stated = metadata.requires("ropewalk") or []
    except metadata.PackageNotFoundError:  # sources that were never installed
        pyproject = Path(__file__).parents[3] / "pyproject.toml"
        stated = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    found = []
    for line in stated:
        parts = re.fullmatch(r"([\w.-]+)\s*>=\s*([\d.]+)", line)  # extras have a marker behind
        if parts is not None and parts[1] != "torch":
            found.append((parts[1], parts[2]))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version.partition("+")[0])[:3])


def read_torch() -> TorchFacts | Finding:
    """Import torch in another process, and return its facts or why that failed."""
    command = [sys.executable, "-P", "-W", "ignore", "-c", _PROBE]
    try:
        ended = subprocess.run(  # noqa: S603  # our own interpreter
            command, capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", "torch", f"was not imported within {_IMPORT_S} s", _AGAIN)
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        return Finding(
            "fail",
            "torch",
            f"cannot be imported: the process ended with {name}",
            "install a build of torch for this processor",
        )
    if ended.returncode:
        last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("fail", "torch", f"cannot be imported: {last_line}", _AGAIN)
    version, cuda, hip, gpus, num_threads = json.loads(ended.stdout)
    build = TorchBuild(version, cuda, hip, finds_gpu=bool(gpus))
    found = (Gpu(name, size, (major, minor)) for name, size, (major, minor) in gpus)
    return TorchFacts(build, tuple(found), num_threads)


def check_torch(facts: TorchFacts) -> Finding:
    """Check that the build fits the machine."""
    found = mismatch(facts.build, has_node=has_nvidia_gpu())
    if found is not None:
        return Finding("warn", "torch", found.text, found.action)
    return Finding("ok", "torch", f"{facts.build.version}, built for {facts.build.kind()}")


def check_device(facts: TorchFacts, device: str) -> Finding:
    """Check that the setting's device is there."""
    index = int(device.partition(":")[2] or 0)
    if device.startswith("cuda") and index >= len(facts.gpus):
        there = f"torch finds {len(facts.gpus)} GPUs"
        return Finding("fail", "device", f"device is {device}, and {there}", "use --device cpu")
    if device == "cpu" or not facts.gpus:
        return Finding("ok", "device", f"cpu, {counted(facts.num_threads, 'thread')}")
    if facts.build.hip is not None:
        return Finding(
            "warn",
            "device",
            f"{facts.gpus[0].name} by ROCm, which this project has not tried",
            "use --device cpu if answers are wrong",
        )
    text = "cuda: " + "; ".join(
        f"{each.name}, {size_text(each.num_bytes)}, compute capability {_shown(each.capability)}"
        for each in facts.gpus
    )
    if facts.gpus[index].capability < LEAST_CAPABILITY:
        return Finding(
            "warn",
            "device",
            f"{text}, and the kernels are made for {_shown(LEAST_CAPABILITY)} and later",
            "use another card, or --device cpu (docs/guide/install.md)",
        )
    return Finding("ok", "device", text)


def _shown(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
