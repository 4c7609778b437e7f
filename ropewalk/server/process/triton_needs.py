"""Checks of what Triton needs beside a GPU: a C compiler that works, and a folder for its cache.

Triton compiles the launcher of its kernels when the first of them runs, which is after the weights
were read. The rules here are those of triton/runtime/build.py and triton/knobs.py. Neither Triton
nor torch is imported.
"""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from ropewalk.model_runtime.gpu_nodes import Device, has_gpu_kernels
from ropewalk.server.settings.load import SettingsError

_SOURCE = "#include <Python.h>\n"  # it includes libc's headers
_COMPILER_CURE = (
    "install a compiler with the headers of libc and of Python (Debian: gcc libc6-dev python3-dev)"
)
_FOLDER_CURE = "set TRITON_CACHE_DIR to a folder that can be written"


def refuse_without_needs(device: Device) -> None:
    """Raise SettingsError with a line for each thing that Triton lacks for a device."""
    if not has_gpu_kernels(device):
        return
    lacking = []
    for check in (try_compiler, try_cache_folder):
        try:
            check()
        except SettingsError as error:
            lacking.append(str(error))
    if lacking:
        raise SettingsError("\n".join(lacking))


def try_compiler() -> str:
    """Compile an empty module as Triton would, and return the compiler. Raises SettingsError."""
    program = os.environ.get("CC")
    if program is None:
        program = shutil.which("gcc") or shutil.which("clang")
    if program is None:
        raise SettingsError(
            f"Triton needs a C compiler, and PATH has no gcc or clang: {_COMPILER_CURE}"
        )
    try:
        with TemporaryDirectory() as folder:
            source = Path(folder) / "empty.c"
            source.write_text(_SOURCE)
            headers = sysconfig.get_path("include", "posix_prefix")
            command = [program, str(source), "-shared", "-fPIC", "-o", f"{folder}/empty.so"]
            ended = subprocess.run(  # noqa: S603  # the machine's own compiler
                [*command, f"-I{headers}"], capture_output=True, text=True, check=False
            )
    except OSError as error:
        raise SettingsError(
            f"Triton's compiler {program!r} cannot be run ({error.strerror}): {_COMPILER_CURE}"
        ) from error
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"code {ended.returncode}"]
        told = next((each for each in lines if "error:" in each), lines[-1])
        raise SettingsError(
            f"Triton's compiler {program} makes no module of Python ({told}): {_COMPILER_CURE}"
        )
    return program


def try_cache_folder() -> Path:
    """Return the folder of Triton's cache. Raises SettingsError if it takes no new folder.

    Only an attempt tells whether it can be written, or made: root may write to /proc, and makes
    no folder there.
    """
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))  # noqa: PTH111  # it raises nothing
    folder = Path(os.environ.get("TRITON_CACHE_DIR", f"{home}/.triton/cache"))
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))  # noqa: PTH110  # it raises nothing
    try:
        os.rmdir(mkdtemp(prefix=".ropewalk", dir=there))  # noqa: PTH106
    except OSError as error:
        raise SettingsError(
            f"Triton's cache {folder} cannot be written ({error.strerror}): {_FOLDER_CURE}"
        ) from error
    return folder
