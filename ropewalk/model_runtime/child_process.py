"""A module of this project as a process of its own, and the limits that it sets itself.

A child process imports what its module imports and no more. The kernel enforces the limits, inside
one call of a library too, and after the server has died.
"""

import os
import resource
import signal
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
# Not by `-m`: an environment variable or a file could put another package of the name first.
_CODE = (
    "import sys, importlib; sys.path.insert(0, sys.argv.pop(1)); "
    "importlib.import_module(sys.argv.pop(1)).main()"
)
# Variables that an interpreter may need to start, and to write times and texts.
_KEPT = frozenset({"PATH", "HOME", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "TZ"})
_KEPT_PREFIXES = ("LC_", "PYTHON")
_STATM = Path("/proc/self/statm")
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def command_of(module: str) -> list[str]:
    """Return the command that calls the function `main` of a module in a new interpreter."""
    return [sys.executable, "-P", "-c", _CODE, str(_ROOT), module]


def bare_environment() -> dict[str, str]:
    """Return this process's environment without what a module does not need, such as secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES)
    }


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, where it can."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415  # most child processes go without

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_seconds(seconds: float) -> None:
    """Let the kernel end this process after so much processor time; 0: no more limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def memory_in_use() -> int | None:
    """Return the bytes that this process has for its data; None without Linux."""
    if not _STATM.is_file():
        return None
    return int(_STATM.read_text().split()[5]) * resource.getpagesize()


def limit_memory(max_bytes: int) -> None:
    # Not RLIMIT_AS: malloc reserves 128 MiB of addresses per thread, which use no memory.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, hard))


def prepare_limits() -> None:
    """Disable core files, and let the end of the time end the process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent may ignore it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
