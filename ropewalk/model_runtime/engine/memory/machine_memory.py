"""The memory of the machine, or of the control group that the process is in.

systemd, Docker and Kubernetes limit memory by control groups (cgroups(7)). A process may use what
its group and every group above it allow. Version 1 has a hierarchy of its own for memory.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ropewalk.model_runtime.size_text import size_text


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The memory that processes here may use, in bytes."""

    total: int  # without swap
    free: int  # unused, or pages of files that the system may drop
    free_swap: int = 0  # 0 in a control group with a limit, whose share of it is not read

    def shortage(self, num_bytes: int, what: str) -> str | None:
        """Return a sentence if `what`, which needs `num_bytes`, has no room here; else None."""
        if num_bytes > self.total:
            told = f"this machine has {size_text(self.total)}"
        elif num_bytes > self.free + self.free_swap:
            told = f"{size_text(self.free)} of this machine's {size_text(self.total)} are free"
        else:
            return None
        return f"{what} need {size_text(num_bytes)}, {told}"


class _Names(NamedTuple):
    """The files of a control group's memory, by version."""

    mount: str
    limit: str
    used: str
    cached: tuple[str, ...]  # lines of memory.stat: pages that the system may drop


_VERSION_1 = _Names(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = _Names(
    "sys/fs/cgroup",
    "memory.max",
    "memory.current",
    ("inactive_file", "active_file", "slab_reclaimable"),
)


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Return the memory of this machine or container; `root` has its /proc and /sys."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stated = _bytes_by_name(root / "proc/meminfo")
    total = stated.get("MemTotal", total)
    free, free_swap = stated.get("MemAvailable", total), stated.get("SwapFree", 0)
    for limit, used in _groups(root):
        if limit < total:
            total, free_swap = limit, 0
        free = min(free, limit - used)
    return MachineMemory(total, max(0, free), free_swap)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of the process' group and of those above it, as far as they are stated.

    A container may see its own group as the root, under a path that it cannot open.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _VERSION_1 if controllers else _VERSION_2
        mount = root / names.mount
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount) and (found := _group(folder, names)) is not None:
                yield found


def _group(folder: Path, names: _Names) -> tuple[int, int] | None:
    """Return a group's limit and use, without pages that can be dropped; None without a limit."""
    try:
        limit = int((folder / names.limit).read_text())
        used = int((folder / names.used).read_text())
    except (OSError, ValueError):  # no such file, or the limit is `max`
        return None
    stat = _bytes_by_name(folder / "memory.stat")
    return limit, used - sum(stat.get(each, 0) for each in names.cached)


def _bytes_by_name(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line, in bytes."""
    found = {}
    for line in _lines(path):
        name, *rest = line.replace(":", " ").split()
        if rest and rest[0].isdigit():
            found[name] = int(rest[0]) * (1024 if rest[1:] == ["kB"] else 1)
    return found


def _lines(path: Path) -> list[str]:
    """Return a file's lines that hold something; none if it cannot be read, as outside Linux."""
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        return []
