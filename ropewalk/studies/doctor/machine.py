"""Checks of the machine: processor, disks and the port."""

import os
import platform
import shutil
from pathlib import Path

from ropewalk.model_runtime.size_text import size_text
from ropewalk.server.settings.load import ServeSettings, SettingsError
from ropewalk.server.startup.gate import listening_socket
from ropewalk.studies.doctor.finding import Finding

_FEATURES = ("avx2", "fma", "avx512f", "avx512vl", "avx512bf16", "amx-bf16", "neon", "bf16")
_LEAST_KERNEL_BYTES = 20 << 20
_LEAST_DISK = 5 << 30
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_processor() -> Finding:
    """Check the instruction sets that the kernels are compiled for."""
    from ropewalk.model_runtime.cpu_kernels.target import target_features, vectors  # noqa: PLC0415

    found = vectors()
    features = ", ".join(each for each in _FEATURES if each in target_features()) or "none known"
    text = f"{platform.machine()}, {_num_cores()} cores, kernels in {found.name} ({features})"
    if found.lanes >= 8 or found.name == "NEON":
        return Finding("ok", "processor", text)
    return Finding(
        "warn",
        "processor",
        text,
        "a processor with AVX2 is several times faster (docs/design/cpu-kernels.md)",
    )


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_kernel_cache() -> Finding:
    """Check that compiled kernels outlive the process, and that only this user can write them."""
    import numba  # noqa: PLC0415

    from ropewalk.model_runtime.cpu_kernels.jit import KeptCode, fingerprint  # noqa: PLC0415

    wanted = numba.config.CACHE_DIR
    try:
        # As for a kernel; any function of that folder has the same cache.
        folder = Path(KeptCode(fingerprint).cache_path)
    except RuntimeError:
        return Finding(
            "warn",
            "kernel cache",
            f"no folder can be written ({wanted or '__pycache__'}), so each start compiles for "
            "half a minute",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )
    free = shutil.disk_usage(folder).free
    if free < _LEAST_KERNEL_BYTES:
        return Finding(
            "warn", "kernel cache", f"{folder} has {size_text(free)} free", "free 20 MB there"
        )
    if wanted and not folder.is_relative_to(wanted):
        return Finding(
            "warn",
            "kernel cache",
            f"NUMBA_CACHE_DIR {wanted} cannot be written, {folder} is used",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )
    state = "empty, the first start compiles"
    if any(folder.glob("*.nbc")):
        state = "kernels compiled"
    return Finding("ok", "kernel cache", f"{folder}, {state}")


def check_huge_pages() -> Finding:
    """Check that the kernel gives huge pages to weights and to the cache, which ask for them."""
    try:
        chosen = _HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding("ok", "huge pages", "this system has no setting of them")
    if chosen != "never":
        return Finding("ok", "huge pages", chosen)
    return Finding(
        "warn",
        "huge pages",
        "never, so reading weights may take twice as long, most of all in a virtual machine",
        f"as root, write madvise to {_HUGE_PAGES} (docs/design/cpu-kernels.md)",
    )


def check_hub_cache() -> Finding:
    """Check the folder of downloaded models and the room on its disk."""
    from huggingface_hub import constants  # noqa: PLC0415

    cache = Path(constants.HF_HUB_CACHE)
    there = next(each for each in (cache, *cache.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    offline = ", HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    text = f"{cache}, {size_text(free)} free{offline}"
    if not there.is_dir() or not os.access(there, os.W_OK):
        action = "set HF_HOME to a folder that can be written, if models are downloaded"
        return Finding("warn", "hub cache", f"{text}, not writable", action)
    if free < _LEAST_DISK:
        action = "free some, or set HF_HOME to a folder on a larger disk"
        return Finding("warn", "hub cache", text, action)
    return Finding("ok", "hub cache", text)


def check_port(settings: ServeSettings) -> Finding:
    """Check that the server could listen."""
    try:
        listening_socket(settings).close()
    except SettingsError as error:
        return Finding("fail", "port", str(error), "choose another --port, or end what uses it")
    return Finding("ok", "port", f"{settings.host} port {settings.port} is free")
