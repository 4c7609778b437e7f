"""What Triton needs beside a GPU is looked for as Triton does, and refused before weights."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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
_LAUNCHER = """
import sys
from triton.backends.nvidia.driver import CudaUtils
print(CudaUtils().launch)
"""


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


def both_refuse(ours: Callable[[], object], told: str) -> str:
    """The sentence of a check, where Triton ends, too."""
    with pytest.raises(Exception, match=told):
        built_by_triton()
    with pytest.raises(SettingsError) as caught:
        ours()
    return str(caught.value)


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


def test_without_a_compiler_both_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty PATH, a CC that is absent, and one that compiles nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        told = both_refuse(try_compiler, "Failed to find C compiler")
    assert told.startswith("Triton needs a C compiler, and PATH has no gcc or clang: ")
    for program, expected in (
        ("no-such-cc", "Triton's compiler 'no-such-cc' cannot be run (No such file or directory)"),
        ("false", "Triton's compiler false makes no module of Python (code 1)"),
    ):
        monkeypatch.setenv("CC", program)
        assert both_refuse(try_compiler, program).startswith(f"{expected}: {_HEADERS}")


def test_without_headers_both_refuse(
    gcc_alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sentence has the compiler's own."""
    monkeypatch.setenv("CC", str(gcc_alone / "gcc"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    paths = {"include": str(tmp_path)}
    monkeypatch.setattr("sysconfig.get_paths", lambda *_, **__: paths)
    monkeypatch.setattr("sysconfig.get_path", lambda name, *_: paths[name])
    told = both_refuse(try_compiler, "returned non-zero exit status")
    assert "Python.h: No such file or directory" in told
    assert _HEADERS in told


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_a_folder_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """/proc takes no folder, from root either. Triton's default is below a home."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, "/proc/self")
    told = both_refuse(try_cache_folder, "No such file or directory")
    folder = "/proc/self" if variable == "TRITON_CACHE_DIR" else "/proc/self/.triton/cache"
    assert told == f"Triton's cache {folder} cannot be written (No such file or directory): " + (
        _FOLDER
    )


def test_tritons_launcher_is_compiled_by_gcc_alone(gcc_alone: Path, tmp_path: Path) -> None:
    """Its own source, beside a libcuda that has the names and nothing behind them."""
    source = Path(triton.__file__).parent / "backends/nvidia/driver.c"
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\()", source.read_text())))
    (tmp_path / "cuda.c").write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    library = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(["gcc", str(tmp_path / "cuda.c"), *library], check=True)  # noqa: S607
    environment = {
        "PATH": str(gcc_alone),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    command = [sys.executable, "-c", _LAUNCHER]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "built-in" in ended.stdout, ended.stderr
    assert list((tmp_path / "cache").rglob("cuda_utils*.so"))


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
