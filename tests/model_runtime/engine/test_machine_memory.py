"""The memory of a machine is that of its control group, if it has one with a limit."""

from pathlib import Path

import pytest

from ropewalk.model_runtime.engine.memory.machine_memory import MachineMemory, machine_memory

GIB = 2**30
_MEMINFO = """MemTotal:       67108864 kB
MemFree:         1048576 kB
MemAvailable:   41943040 kB
SwapFree:        8388608 kB
HugePages_Total:       0
"""
# limit, use, and of that pages of files, in GiB, by version
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file {}\nactive_file {}\nfile {}\n"),
    1: (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "inactive_file 7\ntotal_inactive_file {}\ntotal_active_file {}\n",
    ),
}
_OWN = {2: "0::{}\n", 1: "12:pids:/elsewhere\n4:memory:{}\n1:name=systemd:/\n0::/\n"}
Group = tuple[int | str, int, int]


def machine(root: Path, version: int, own: str, groups: dict[str, Group]) -> MachineMemory:
    """The memory of a machine of 64 GiB with these groups; the process is in `own`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(_MEMINFO)
    (root / "proc/self/cgroup").write_text(_OWN[version].format(own))
    for path, (limit, used, cached) in groups.items():
        limit_name, used_name, stat = _FILES[version]
        mount, _, limit_name = limit_name.rpartition("/")
        folder = root / "sys/fs/cgroup" / mount / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_name).write_text(f"{limit if limit == 'max' else int(limit) * GIB}\n")
        (folder / used_name.rpartition("/")[2]).write_text(f"{used * GIB}\n")
        half = cached * GIB // 2
        (folder / "memory.stat").write_text(stat.format(half, half, 3 * GIB))
    return machine_memory(root)


def test_without_control_groups_the_kernel_says_what_is_available(tmp_path: Path) -> None:
    """Pages of files count as free memory, and free swap is a number of its own."""
    assert machine(tmp_path, 2, "/", {}) == MachineMemory(64 * GIB, 40 * GIB, 8 * GIB)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("own", "groups", "expected"),
    [
        # a container, which sees its group as the root, under a path of the host
        ("/docker/4f2a", {"": (4, 3, 2)}, (4, 3)),
        # a unit of systemd: its own limit
        ("/system.slice/ropewalk.service", {"system.slice/ropewalk.service": (8, 1, 0)}, (8, 7)),
        # a pod's limit above that of the container, and one of the node's slice
        ("/a/b", {"a": (6, 5, 0), "a/b": (16, 2, 0)}, (6, 1)),
        # another unit's limit
        ("/a/b", {"a/c": (2, 1, 0)}, (64, 40)),
        # a limit above what the machine has
        ("/a", {"a": (100, 3, 0)}, (64, 40)),
        # more is used than the limit allows
        ("/a", {"a": (2, 3, 0)}, (2, 0)),
    ],
)
def test_the_smallest_limit_of_the_groups_counts(
    tmp_path: Path, version: int, own: str, groups: dict[str, Group], expected: tuple[int, int]
) -> None:
    """Swap is not counted in a group with a limit."""
    found = machine(tmp_path, version, own, groups)
    total, free = expected
    swap = 8 * GIB if total == 64 else 0
    assert found == MachineMemory(total * GIB, free * GIB, swap)


def test_a_group_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    """Version 2 says `max`."""
    found = machine(tmp_path, 2, "/a", {"a": ("max", 3, 0)})
    assert (found.total, found.free) == (64 * GIB, 40 * GIB)


def test_a_system_without_these_files_has_its_total(tmp_path: Path) -> None:
    """Nothing is known to be in use there."""
    found = machine_memory(tmp_path)
    assert found.total == found.free > GIB
    assert found.free_swap == 0


def test_this_machine_tells_less_free_than_it_has() -> None:
    """The real files are read, whatever the version of control groups here."""
    found = machine_memory()
    assert 0 < found.free < found.total
