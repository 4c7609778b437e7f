"""`ropewalk doctor` on a fit machine, and with one thing broken at a time."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropewalk.server.process.torch_build import TorchBuild
from ropewalk.studies.doctor.finding import Finding, checked
from ropewalk.studies.doctor.machine import (
    check_hub_cache,
    check_huge_pages,
    check_kernel_cache,
    check_processor,
)
from ropewalk.studies.doctor.packages import (
    Gpu,
    TorchFacts,
    check_device,
    check_packages,
    read_torch,
)
from tests.servers.hub_server import use_hub
from tests.servers.processes import run_here, run_to_end

NAMES = (
    *("python", "packages", "torch", "device", "processor", "kernel cache"),
    *("huge pages", "hub cache", "port", "config check"),
)
HERE = ("--port", "0", "--device", "cpu")
H200, _H200 = Gpu("H200", 150 << 30, (9, 0)), "H200, 150 GiB, compute capability 9.0"
T4, _T4 = Gpu("T4", 15 << 30, (7, 5)), "T4, 15 GiB, compute capability 7.5"


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that something listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def facts(*gpus: Gpu, cuda: str | None = "13.0", hip: str | None = None) -> TorchFacts:
    """A torch that finds these GPUs."""
    return TorchFacts(TorchBuild("2.13", cuda, hip, finds_gpu=bool(gpus)), gpus, 4)


def broken_torch(folder: Path, source: str) -> None:
    """Write a package that is found instead of torch."""
    (folder / "torch").mkdir(exist_ok=True)
    (folder / "torch" / "__init__.py").write_text(source)


def test_a_fit_machine_has_a_line_for_each_check() -> None:
    """A line is a status, a name and a finding. The embedded model is the default."""
    ended = run_here("doctor", *HERE)
    assert ended.returncode == 0, ended.stdout
    lines = [line for line in ended.stdout.splitlines() if not line.startswith("  ")]
    assert [re.split("  +", line[6:])[0] for line in lines] == list(NAMES)
    assert {line[:6].strip() for line in lines} <= {"ok", "warn"}
    assert "  deployment       ropewalk-demo\n" in ended.stdout


def test_json_has_the_same_checks() -> None:
    """The object has the worst status, and null for nothing to do."""
    found = json.loads(run_here("doctor", *HERE, "--json").stdout)
    assert [each["name"] for each in found["checks"]] == list(NAMES)
    assert found["status"] in {"ok", "warn"}
    for each in found["checks"]:
        assert set(each) == {"status", "name", "finding", "action"}
        assert (each["action"] is None) == (each["status"] == "ok")


def test_a_taken_port_fails(taken_port: int) -> None:
    """The exit code is 2, and the other checks are made."""
    ended = run_here("doctor", "--device", "cpu", "--port", str(taken_port))
    assert ended.returncode == 2
    assert re.search(
        rf"^fail  port +cannot listen on .* port {taken_port}: ", ended.stdout, re.MULTILINE
    )
    assert "ok    config check\n" in ended.stdout


def test_a_model_that_cannot_be_read_fails(tmp_path: Path) -> None:
    """The sentence is that of `serve`."""
    ended = run_here("doctor", str(tmp_path), *HERE)
    assert ended.returncode == 2
    assert f"{tmp_path} has no config.json" in ended.stdout.splitlines()[-1]


def test_a_torch_that_cannot_be_imported_is_a_line(tmp_path: Path) -> None:
    """Nothing else of the command imports torch, so no traceback is printed."""
    broken_torch(tmp_path, "raise OSError('libtorch.so: cannot open shared object file')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = run_to_end("doctor", *HERE, env={"PYTHONPATH": path})
    assert ended.returncode == 2
    assert "Traceback" not in ended.stdout + ended.stderr
    sentence = "fail  torch         cannot be imported: OSError: libtorch.so: cannot open shared"
    assert sentence in ended.stdout
    assert "fail  config check  not made, because torch cannot be imported" in ended.stdout


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "No module named 'torch'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "the process ended with SIGILL"),
    ],
)
def test_a_torch_that_is_missing_or_crashes_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, text: str
) -> None:
    """A processor without the instructions of a build ends the process that imports it."""
    broken_torch(tmp_path, source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = read_torch()
    assert isinstance(found, Finding)
    assert found.status == "fail"
    assert text in found.text
    assert found.action


@pytest.mark.parametrize(
    ("gpus", "device", "status", "text"),
    [
        ((), "auto", "ok", "cpu, 4 threads"),
        ((H200,), "auto", "ok", f"cuda: {_H200}"),
        ((H200,), "cpu", "ok", "cpu, 4 threads"),
        ((H200,), "cuda:1", "fail", "device is cuda:1, and torch finds 1 GPUs"),
        ((), "cuda", "fail", "device is cuda, and torch finds 0 GPUs"),
        ((H200, T4), "cuda", "ok", f"cuda: {_H200}; {_T4}"),
        (
            (H200, T4),
            "cuda:1",
            "warn",
            f"cuda: {_H200}; {_T4}, and the kernels are made for 8.0 and later",
        ),
    ],
)
def test_the_device_of_the_settings_is_looked_for(
    gpus: tuple[Gpu, ...], device: str, status: str, text: str
) -> None:
    """A GPU has its name, its memory, and a capability that the kernels may be too new for."""
    found = check_device(facts(*gpus), device)
    assert (found.status, found.text) == (status, text)


def test_rocm_is_a_warning() -> None:
    """The project has not tried it."""
    assert check_device(facts(Gpu("MI300", 1 << 30, (9, 4)), hip="6.4"), "auto").status == "warn"


def test_missing_and_old_packages_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is named with the version that is needed."""
    needed = [("numpy", "99.0"), ("no-such-package", "1.0"), ("click", "8.1")]
    monkeypatch.setattr("ropewalk.studies.doctor.packages._requirements", lambda: needed)
    found = check_packages()
    assert found.status == "fail"
    expected = r"numpy is [\d.]+, and at least 99.0 is needed, no-such-package is missing"
    assert re.fullmatch(expected, found.text)


def test_the_requirements_are_those_of_the_package() -> None:
    """They have lower bounds; torch has a check of its own, and extras are left out."""
    from ropewalk.studies.doctor.packages import _requirements

    found = dict(_requirements())
    assert {"click", "numba", "transformers", "uvicorn"} <= set(found)
    assert not {"torch", "matplotlib", "pytest"} & set(found)


def test_kernels_that_are_not_kept_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NUMBA_CACHE_DIR is named if it cannot be written, and if nothing can."""
    import numba

    assert check_kernel_cache().status == "ok"
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "kernels"))
    found = check_kernel_cache()
    assert found.status == "warn"
    assert f"NUMBA_CACHE_DIR {tmp_path / 'file' / 'kernels'} cannot be written" in found.text

    def no_locator(_: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr("ropewalk.model_runtime.cpu_kernels.jit.KeptCode", no_locator)
    assert "each start compiles" in check_kernel_cache().text


def test_kept_kernels_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under NUMBA_CACHE_DIR each folder of sources has one of its own."""
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert "empty, the first start compiles" in check_kernel_cache().text
    (own,) = tmp_path.glob("cpu_kernels_*")
    (own / "1.nbc").touch()
    assert check_kernel_cache().text.endswith(", kernels compiled")


def test_a_narrow_processor_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruction set is that of the kernels."""
    from ropewalk.model_runtime.cpu_kernels import target as processor

    assert check_processor().status == "ok"
    narrow = processor.Vectors("SSE", 4, 16, has_fma=False)
    monkeypatch.setattr(processor, "vectors", lambda: narrow)
    found = check_processor()
    assert found.status == "warn"
    assert "kernels in SSE" in found.text


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's cache may not exist yet; its disk is that of the nearest folder."""
    use_hub(monkeypatch, "http://127.0.0.1:9", str(tmp_path / "a" / "b"), offline=True)
    monkeypatch.setattr("ropewalk.studies.doctor.machine._LEAST_DISK", 0)
    found = check_hub_cache()
    assert found.status == "ok"
    assert f"{tmp_path / 'a' / 'b'}, " in found.text
    assert found.text.endswith("free, HF_HUB_OFFLINE is set")
    monkeypatch.setattr("ropewalk.studies.doctor.machine._LEAST_DISK", 1 << 60)
    assert check_hub_cache().status == "warn"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert check_hub_cache().text.endswith("not writable")


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("always [madvise] never\n", "ok", "madvise"),
        ("[always] madvise never\n", "ok", "always"),
        ("always madvise [never]\n", "warn", "never, so reading weights"),
        (None, "ok", "no setting"),
    ],
)
def test_a_kernel_without_huge_pages_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, status: str, says: str
) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    monkeypatch.setattr("ropewalk.studies.doctor.machine._HUGE_PAGES", setting)
    found = check_huge_pages()
    assert (found.status, found.name) == (status, "huge pages")
    assert says in found.text


def test_a_check_that_raises_is_a_finding() -> None:
    """Only the first line of the exception is shown."""

    def check() -> Finding:
        raise RuntimeError("first\nsecond")

    found = checked("name", check)
    assert found.status == "fail"
    assert found.line().startswith("fail  name          cannot be checked: RuntimeError: first;")
    assert "second" not in found.line()
