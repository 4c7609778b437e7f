"""Check that no other user can change the machine code that numba keeps for the CPU kernels.

numba reads it by pickle, which runs code. A folder that others may write lets them run theirs.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ropewalk.server.settings.load import SettingsError

_ROOT_ID = 0
# Linux shows this owner for one that has no number in a container's own range of users.
_NO_USER = 65534
_KEPT = (".nbi", ".nbc")  # numba's index, and the code
_OTHER = "or set NUMBA_CACHE_DIR to a folder that only this user can write"


@dataclass(frozen=True, slots=True)
class Writer:
    """A user or group that is not trusted, and may write."""

    text: str  # path and writer
    action: str  # for the operator


def refuse_shared_kernels() -> None:
    """Raise SettingsError if other users could change the kernels that this process would load."""
    for folder in kernel_folders():
        found = writer_of(folder)
        if found is not None:
            raise SettingsError(f"kernel cache: {found.text}: {found.action}")


def kernel_folders() -> list[Path]:
    """Return the folder that numba takes for each folder of the kernels' sources; imports numba."""
    from numba.core.caching import CompileResultCacheImpl  # noqa: PLC0415

    from ropewalk.model_runtime.cpu_kernels.jit import SOURCES, fingerprint  # noqa: PLC0415

    found = []
    for source in {path.parent: path for path in SOURCES}.values():
        for locator in CompileResultCacheImpl._locator_classes:  # noqa: SLF001
            made = locator.from_function(fingerprint, str(source))
            if made is not None:
                found.append(Path(made.get_cache_path()))
                break
    return found


def writer_of(folder: Path) -> Writer | None:
    """Return a user or group that could change kernels in a folder; None if none could.

    Root and the owner of the sources may change them: their code runs anyway.
    """
    folder = folder.resolve()
    sources = Path(__file__).resolve().parent
    trusted = {os.geteuid(), _ROOT_ID, sources.stat().st_uid}
    kept = (each for each in folder.iterdir() if each.suffix in _KEPT)
    for path in (folder, *kept):
        found = _writer(path, trusted)
        if found is not None:
            return found
    for path in _above(folder, sources):
        found = _writer(path, {*trusted, _NO_USER})
        if found is not None:
            return found
    return None


def _above(folder: Path, sources: Path) -> Iterator[Path]:
    """Yield the folders above one in which others could put another in its place.

    In a sticky folder they cannot. Those that hold the sources, too, protect them no better. A
    volume of root's is left out: Kubernetes lets every user of a container write there.
    """
    for path in folder.parents:
        if path in sources.parents:
            return
        mode = path.stat()
        is_volume = mode.st_uid == _ROOT_ID and path.is_mount()
        if not (mode.st_mode & stat.S_ISVTX or is_volume):
            yield path


def _writer(path: Path, trusted: set[int]) -> Writer | None:
    """Return which user or group that is not trusted may write; None if there is none."""
    found = path.stat()
    if found.st_uid not in trusted:
        text = f"{path} belongs to the user {_user_name(found.st_uid)}"
        return Writer(text, f"change its owner, {_OTHER}")
    if found.st_mode & stat.S_IWOTH:
        return Writer(f"{path} can be written by every user", f"chmod o-w, {_OTHER}")
    if found.st_mode & stat.S_IWGRP:
        group = _group_of_others(found.st_gid, found.st_uid)
        if group is not None:
            text = f"{path} can be written by the group {group}"
            return Writer(text, f"chmod g-w, {_OTHER}")
    return None


def _user_name(user_id: int) -> str:
    import pwd  # noqa: PLC0415

    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _group_of_others(group_id: int, owner: int) -> str | None:
    """Return the name of a group that may have other members; None for a private one.

    A private group has the name of the owner and no other member, as most Linux systems make one
    for each user. Root's group passes, and one without a name, which only containers have.
    """
    import grp  # noqa: PLC0415

    if group_id == _ROOT_ID:
        return None
    try:
        group = grp.getgrgid(group_id)
    except KeyError:
        return None
    is_private = group.gr_name == _user_name(owner)
    return None if is_private and set(group.gr_mem) <= {group.gr_name} else group.gr_name
