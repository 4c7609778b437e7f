"""Checks of what a GPU needs beside torch: a compiler, a folder for Triton's cache, a driver."""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ropewalk.server.process.torch_build import has_nvidia_gpu
from ropewalk.server.process.triton_needs import try_cache_folder, try_compiler
from ropewalk.server.settings.load import SettingsError
from ropewalk.studies.doctor.finding import Finding, checked
from ropewalk.studies.doctor.packages import TorchFacts

_DRIVER = Path("/proc/driver/nvidia/version")
# Version of CUDA -> the oldest driver that runs all its minor versions, by NVIDIA's page "CUDA
# Compatibility". A package of NVIDIA's lets some cards run a newer CUDA than their driver's.
_LEAST_DRIVERS = {"12": 525, "13": 580}


def gpu_findings(device: str, torch: TorchFacts | None) -> Iterator[Finding]:
    """Yield the findings of a machine that may compute on a GPU; none for a CPU.

    `device`: the setting. `torch`: None if it cannot be imported. A missing part is a warning if
    the server would choose the CPU.
    """
    is_found = torch is not None and bool(torch.gpus)
    is_used = device.startswith("cuda") or is_found
    if device == "cpu" or not (is_used or has_nvidia_gpu()):
        return
    checks = {"driver": lambda: check_driver(torch)}
    if find_spec("triton") is None:
        checks["triton"] = _without_triton
    else:
        checks |= {"compiler": check_compiler, "Triton cache": check_triton_cache}
    for name, check in checks.items():
        found = checked(name, check)
        if found.status == "fail" and not is_used:
            found = replace(found, status="warn")
        yield found


def check_driver(torch: TorchFacts | None) -> Finding:
    """Check that NVIDIA's driver is loaded, and not older than torch's CUDA needs."""
    cuda = None if torch is None else torch.build.cuda
    needed = _LEAST_DRIVERS.get((cuda or "").partition(".")[0])
    is_used = torch is not None and bool(torch.gpus)
    newer = "NVIDIA's driver" if needed is None else f"NVIDIA's driver {needed} or later"
    try:
        told = re.search(r"\d+(?:\.\d+)+", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        told = None
    if told is None:
        if is_used:  # Windows' subsystem for Linux has no such file
            return Finding("ok", "driver", "there, its version is not shown here")
        return Finding("fail", "driver", "no NVIDIA driver is loaded", f"install {newer}")
    text = f"NVIDIA {told[0]}"
    if needed is None:
        return Finding("ok", "driver", text)
    text += f", torch for CUDA {cuda} needs {needed} or later"
    if int(told[0].partition(".")[0]) < needed and not is_used:
        action = f"install {newer}, or a torch for an older CUDA (docs/guide/install.md)"
        return Finding("fail", "driver", text, action)
    return Finding("ok", "driver", text)


def check_compiler() -> Finding:
    """Check that Triton could compile its launcher, by a compilation."""
    try:
        return Finding("ok", "compiler", f"{try_compiler()}, for Triton's launcher")
    except SettingsError as error:
        return Finding("fail", "compiler", str(error))


def check_triton_cache() -> Finding:
    """Check that Triton could keep the kernels that it compiles."""
    try:
        return Finding("ok", "Triton cache", str(try_cache_folder()))
    except SettingsError as error:
        return Finding("fail", "Triton cache", str(error))


def _without_triton() -> Finding:
    text = "is not installed, so torch's own operations read the cache, slowly"
    return Finding("warn", "triton", text, "install it in the version of requirements.lock")
