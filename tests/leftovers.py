"""Fail a run that leaves a process or a folder behind.

Every process of a run inherits a mark in its environment, and makes its temporary files in a folder
of the run. At the end both are looked for. A port needs a process, so none stays open either.
"""

import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

import pytest

_MARK = "PYTHON_TESTS_OF_RUN"  # so called because every process inherits PYTHON*
_FOLDER = "TESTS_FOLDER"
_OWNER = "TESTS_OWNER"  # the process whose run it is: neither a worker nor a test's own pytest
# pytest keeps its tests' folders, Ray its clusters' logs, and torch's compiler its cache.
_OTHERS = ("pytest-of-", "ray", "torchinductor_")
_ENDING_S = 10.0  # a process that was told to end may need so long on a loaded machine
_RAY_S = 60.0  # Ray's agents look only now and then whether their node is still there


def begin() -> None:
    """Mark this process and those that it starts; workers of xdist inherit the mark."""
    if _MARK in os.environ:
        return
    os.environ[_MARK] = uuid.uuid4().hex
    os.environ[_OWNER] = str(os.getpid())
    # Short, because the path of a socket has at most 107 letters.
    folder = tempfile.mkdtemp(prefix="run-")
    Path(folder).chmod(0o711)  # the image's user passes through it
    os.environ[_FOLDER] = os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # read TMPDIR again


def _processes() -> list[str]:
    """Return the marked processes that are neither this one nor above it: `pid command`."""
    above = {os.getpid(), os.getppid()}
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) in above:
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"process {entry.name}: {command[:200]}")
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    return found


def _remaining() -> list[str]:
    """Return the marked processes that do not end by themselves."""
    begun = time.monotonic()
    while found := _processes():
        is_ray = all(": ray::" in each for each in found)
        if time.monotonic() - begun > (_RAY_S if is_ray else _ENDING_S):
            break
        time.sleep(0.1)
    return found


def _files() -> list[str]:
    """Return what is left in the folder of the run, besides others' own, and remove it."""
    folder = Path(os.environ[_FOLDER])
    left = sorted(each.name for each in folder.iterdir() if not each.name.startswith(_OTHERS))
    shutil.rmtree(folder, ignore_errors=True)
    return [f"in the temporary folder: {each}" for each in left]


def end(session: pytest.Session) -> None:
    """Turn the run red if it left something behind; processes of a run are part of it."""
    if os.environ[_OWNER] != str(os.getpid()):
        return
    left = [*_remaining(), *_files()]
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for line in ["", "the tests left behind:", *left]:
            reporter.write_line(line, red=True)
