"""Results of trials on this processor, remembered beside numba's machine code.

They depend on the processor, the libraries and our own sources only. A trial by time that is made
anew in each process could choose otherwise in the next one, and with it change the bits of answers.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ropewalk.model_runtime.json_files import read_object

_ROOT = Path(__file__).parent
_SOURCES = ("attention", "cpu_kernels", "layers")  # what decides, and what is tried
_VARIABLES = ("ATEN_", "DNNL_", "MKL_", "NUMBA_", "ONEDNN_")  # they may hide instructions
_OF_NO_BITS = ("_CACHE_DIR", "_NUM_THREADS")  # ends of variables
# Lines of /proc/cpuinfo. The others differ between equal processors, as their number and clock do.
_PROCESSOR = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)
_LIBRARIES = ("llvmlite", "numba", "torch", "transformers")


def remembered(
    trial: str, attempt: Callable[[], Any], is_result: Callable[[Any], bool] = lambda _: True
) -> Any:
    """Return the result of a trial on this machine, which JSON can hold.

    `attempt` makes it if none is kept; one that is not `is_result` is not kept. Processes
    that try at once all take the result that was kept first. If the folder cannot be written, each
    process tries anew.
    """
    # Once, because imports of the trial may set variables that are part of it.
    key = f"{trial} {arithmetic_hash()}"
    file = _file(key)
    known = (read_object(file) or {}).get(key)
    if known is not None and is_result(known):
        return known
    found = attempt()
    part = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({key: found}))
        try:
            file.hardlink_to(part)
        except FileExistsError:  # by a process at the same time, which all others follow
            first = (read_object(file) or {}).get(key)
            if first is not None and is_result(first):
                found = first
            else:
                part.replace(file)
        except OSError:  # a file system without links
            part.replace(file)
    with suppress(OSError):
        part.unlink(missing_ok=True)
    return found


def _file(key: str) -> Path:
    """Return the file of one result; with one for all, processes at once would lose some."""
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return kept_folder() / f"ropewalk-trial-{name}.json"


def kept_folder() -> Path:
    """Return the first folder that can be written, in the order in which numba looks for one."""
    in_tree = _ROOT / "cpu_kernels" / "__pycache__"
    homes = os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME", "") + "/.cache"
    user_wide = next(Path(home) for home in homes if home) / "ropewalk"
    given = os.environ.get("NUMBA_CACHE_DIR")
    folders = (*((Path(given),) if given else ()), in_tree, user_wide)
    return next((folder for folder in folders if _can_be_written(folder)), in_tree)


def _can_be_written(folder: Path) -> bool:
    """Return whether a folder, or the nearest one above it that exists, can be written."""
    nearest = next(each for each in (folder, *folder.parents) if os.path.exists(each))  # noqa: PTH110  # raises nothing
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def arithmetic_hash(*folders: Path) -> str:
    """Return a hash of what decides the arithmetic: processor, libraries, and our sources.

    `folders`: further folders of sources.
    """
    found = hashlib.sha256(f"{platform.machine()} {platform.python_version()}".encode())
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found.update(f"{name} {version(name)}\n".encode())
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES) and not name.endswith(_OF_NO_BITS):
            found.update(f"{name}={value}\n".encode())
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        lines = [
            line for line in first.splitlines() if line.partition(":")[0].strip() in _PROCESSOR
        ]
        found.update("\n".join(lines).encode())
    for folder in (*(_ROOT / each for each in _SOURCES), *folders):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
