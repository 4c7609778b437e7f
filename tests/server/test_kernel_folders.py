"""A cache of compiled kernels that other users can write is refused, because it can hold code."""

import grp
import os
import pickle
import pwd
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.dispatcher import Dispatcher

from ropewalk.model_runtime.cpu_kernels import elementwise
from ropewalk.model_runtime.cpu_kernels.attention import attention
from ropewalk.model_runtime.cpu_kernels.experts import products
from ropewalk.model_runtime.cpu_kernels.jit import SOURCES, KeptCode
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import panels_text
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped import rounded_rows
from ropewalk.model_runtime.cpu_kernels.sealed import seal
from ropewalk.model_runtime.cpu_kernels.states import convolution
from ropewalk.server.process.kernel_folders import kernel_folders, refuse_shared_kernels, writer_of
from ropewalk.server.settings.load import SettingsError
from tests.servers.processes import run_to_end

# These are imported before any test: a kernel takes its folder when its module is imported.
MODULES = (attention, elementwise, products, rounded_rows, seal, convolution)
OTHER = "or set NUMBA_CACHE_DIR to a folder that only this user can write"
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


class Planted:
    """A pickle that makes a file when it is read, as an attacker's would run a program."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder that numba takes for the kernels, below NUMBA_CACHE_DIR."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    folders = kernel_folders()
    assert {each.parent for each in folders} == {tmp_path / "numba"}
    names = {each.name.rpartition("_")[0] for each in folders}
    assert names == {path.parent.name for path in SOURCES}
    yield folders[0]
    shutil.rmtree(tmp_path / "numba")


def kernels() -> list[Any]:
    """The kernels of these modules."""
    values = [value for each in MODULES for value in vars(each).values()]
    return [each for each in values if isinstance(each, Dispatcher)]


def refusal() -> str:
    """The sentence about the folders that numba takes."""
    with pytest.raises(SettingsError) as caught:
        refuse_shared_kernels()
    return str(caught.value)


def test_numba_takes_the_folders_that_are_checked() -> None:
    """The functions of each folder of sources have their code in one of these folders."""
    taken = {Path(each._cache.cache_path) for each in kernels()}
    taken.add(Path(KeptCode(panels_text).cache_path))
    assert taken == set(kernel_folders())
    refuse_shared_kernels()


@pytest.mark.parametrize("where", ["folder", "above", "file"])
def test_what_every_user_can_write_is_refused(folder: Path, where: str) -> None:
    """The folder, NUMBA_CACHE_DIR above it, and a file that was left from such a time."""
    (folder / "kernel.nbi").touch()
    path = {"folder": folder, "above": folder.parent, "file": folder / "kernel.nbi"}[where]
    refuse_shared_kernels()
    path.chmod(0o777)
    assert refusal() == f"kernel cache: {path} can be written by every user: chmod o-w, {OTHER}"
    path.chmod(0o755)
    refuse_shared_kernels()


def test_a_sticky_folder_protects_what_is_below_it_only(folder: Path) -> None:
    """In /tmp, another user's folder cannot be replaced, but files can be added to /tmp itself."""
    folder.parent.chmod(0o1777)
    refuse_shared_kernels()
    folder.chmod(0o1777)
    assert f"{folder} can be written by every user" in refusal()


@is_root
@pytest.mark.parametrize("where", ["folder", "above", "file"])
def test_what_belongs_to_another_user_is_refused(folder: Path, where: str) -> None:
    """An owner can change the mode, so the mode does not protect the file."""
    (folder / "kernel.nbc").touch()
    path = {"folder": folder, "above": folder.parent, "file": folder / "kernel.nbc"}[where]
    os.chown(path, 54_321, 0)
    told = f"kernel cache: {path} belongs to the user 54321: change its owner, {OTHER}"
    assert refusal() == told


def test_root_may_own_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root can change the code of every process anyway."""
    owner = folder.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    monkeypatch.setattr("ropewalk.server.process.kernel_folders._ROOT_ID", owner)
    assert writer_of(folder) is None


@is_root
def test_a_group_of_others_may_not_write(folder: Path) -> None:
    """Root's group and a group without a name may write, because they have no other members."""
    shared = next(each for each in grp.getgrall() if each.gr_gid)
    folder.chmod(0o2775)
    for group in (0, 54_321):
        os.chown(folder, 0, group)
        assert writer_of(folder) is None
    os.chown(folder, 0, shared.gr_gid)
    told = f"{folder} can be written by the group {shared.gr_name}: chmod g-w, {OTHER}"
    assert refusal() == f"kernel cache: {told}"


def test_a_private_group_has_no_other_member(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With umask 002 a folder can be written by its owner's private group."""
    status = folder.stat()
    name = pwd.getpwuid(status.st_uid).pw_name
    monkeypatch.setattr("ropewalk.server.process.kernel_folders._ROOT_ID", -1)
    folder.chmod(0o775)

    def group(name: str, *members: str) -> Callable[[int], grp.struct_group]:
        return lambda number: grp.struct_group((name, "x", number, list(members)))

    for made, is_private in (
        (group(name), True),
        (group(name, name), True),
        (group(name, "other"), False),
        (group("staff"), False),
    ):
        monkeypatch.setattr("grp.getgrgid", made)
        assert (writer_of(folder) is None) is is_private


def test_a_volume_of_root_may_be_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emptyDir of Kubernetes is open. The folders that numba makes in it are the user's."""
    folder.parent.chmod(0o777)
    monkeypatch.setattr("ropewalk.server.process.kernel_folders._ROOT_ID", folder.stat().st_uid)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == folder.parent)
    assert writer_of(folder) is None


@pytest.mark.costly
@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--port", "0", "--device", "cpu"),
        ("eval", "--context-lens", "64", "--device", "cpu"),
        ("doctor", "--port", "0", "--device", "cpu"),
    ],
    ids=lambda each: each[0],
)
def test_commands_refuse_a_shared_cache_with_one_sentence(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """The exit code is 2, and code that lies in the folder has not run."""
    ran = tmp_path / "ran"
    for each in kernels():
        path = Path(KeptCode(each.py_func)._cache_file._index_path)
        path.write_bytes(pickle.dumps(Planted(ran)))
    folder.parent.chmod(0o777)
    if arguments[0] == "eval":
        arguments = (*arguments, "--output", str(tmp_path / "report"))
    ended = run_to_end(*arguments, env={"NUMBA_CACHE_DIR": str(folder.parent)})
    assert not ran.exists()
    assert ended.returncode == 2, ended.stderr
    told = f"{folder.parent} can be written by every user"
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if told in line]
    assert len(lines) == 1
    assert lines[0].endswith(OTHER)
    assert "Traceback" not in ended.stderr
