"""What Triton needs beside a GPU is looked for as Triton does, and refused before weights."""

import re
import shutil
from pathlib import Path

import pytest

from ropewalk.server.process import triton_needs
from ropewalk.server.process.triton_needs import try_cache_folder, try_compiler
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.load_model import load_model
from tests.servers.processes import run_here

triton = pytest.importorskip("triton")
_MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "needs", 0, -1, 0};
PyMODINIT_FUNC PyInit_needs(void) { return PyModule_Create(&module); }
"""
_HEADERS = "install a compiler with the headers of libc and of Python"
_FOLDER = "set TRITON_CACHE_DIR to a folder that can be written"


@pytest.fixture
def gcc_alone(tmp_path: Path) -> Path:
    """A folder with the programs of Debian's gcc and binutils that a compilation runs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("gcc", "as", "ld"):
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"{name} is not installed")
        (folder / name).symlink_to(found)
    return folder


def built_by_triton() -> str:
    """Compile a module by Triton's own function, and return the file that it keeps."""
    from triton.runtime.build import compile_module_from_src

    file = compile_module_from_src(_MODULE, "needs").__file__
    assert file is not None
    return file


def test_triton_builds_with_what_the_checks_accept(
    gcc_alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler and the folder are those that Triton takes; a check leaves nothing there."""
    folder = tmp_path / "a" / "cache"
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(gcc_alone))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    assert try_compiler() == str(gcc_alone / "gcc")
    assert try_cache_folder() == folder
    assert not folder.parent.exists()
    assert Path(built_by_triton()).is_relative_to(folder)


def test_an_absent_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty PATH, a CC that is absent, and one that compiles nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(SettingsError, match=r"^Triton needs a C compiler, and PATH has no gcc"):
            try_compiler()
    for program, expected in (
        ("no-such-cc", "Triton's compiler 'no-such-cc' cannot be run (No such file or directory)"),
        ("false", "Triton's compiler false makes no module of Python (code 1)"),
    ):
        monkeypatch.setenv("CC", program)
        with pytest.raises(SettingsError, match=re.escape(f"{expected}: {_HEADERS}")):
            try_compiler()


def test_a_lack_is_refused_before_weights_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By `config check`, and by the load of `serve`, `eval` and `inspect`; not on a CPU.

    The load has not looked for the model yet.
    """
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/self")
    assert run_here("config", "check", "--device", "cpu").returncode == 0
    monkeypatch.setattr(triton_needs, "has_gpu_kernels", lambda _: True)
    checked = run_here("config", "check", "--device", "cpu")
    assert checked.returncode == 2
    with pytest.raises(SettingsError) as caught:
        load_model(load_settings({"device": "cpu", "model": str(tmp_path / "absent")}))
    lines = str(caught.value).splitlines()
    assert [each.partition(", ")[0] for each in lines] == [
        "Triton needs a C compiler",
        f"Triton's cache /proc/self cannot be written (No such file or directory): {_FOLDER}",
    ]
    assert all(f"ropewalk: {each}" in checked.stderr.splitlines() for each in lines)
