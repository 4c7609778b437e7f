"""What `ropewalk doctor` says of driver, compiler and Triton's cache, without a GPU."""

import re
import sys
from pathlib import Path

import pytest

from ropewalk.server.process.torch_build import TorchBuild
from ropewalk.studies.doctor import gpu, packages
from ropewalk.studies.doctor.finding import Finding
from ropewalk.studies.doctor.gpu import check_driver, gpu_findings
from ropewalk.studies.doctor.packages import Gpu, TorchFacts
from tests.servers.processes import run_here

NAMES = ["driver", "compiler", "Triton cache"]
_LINE = "NVRM version: NVIDIA UNIX {}  {}  Tue Sep 23 10:11:41 UTC 2025\nGCC version:  gcc 12.2.0\n"
CLOSED, OPEN = "x86_64 Kernel Module", "Open Kernel Module for x86_64"


def facts(cuda: str | None, *, finds_gpu: bool) -> TorchFacts:
    """A torch for this CUDA."""
    gpus = (Gpu("H200", 150 << 30, (9, 0)),) if finds_gpu else ()
    return TorchFacts(TorchBuild("2.13", cuda, None, finds_gpu), gpus, 4)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which a driver says its version; there is none yet."""
    monkeypatch.setattr(gpu, "_DRIVER", tmp_path / "version")
    return tmp_path / "version"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Path) -> Path:
    """A machine without compiler, folder and driver."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/self")
    return driver


@pytest.mark.usefixtures("bare")
def test_each_thing_that_a_gpu_lacks_fails_with_its_cure() -> None:
    """torch is not needed for it, and may be broken."""
    for torch in (None, facts("13.0", finds_gpu=True), facts("13.0", finds_gpu=False)):
        found = list(gpu_findings("cuda", torch))
        assert [each.name for each in found] == NAMES
        assert [each.status for each in found[1:]] == ["fail", "fail"]
        assert "install a compiler with the headers of libc" in found[1].text
        assert "set TRITON_CACHE_DIR to a folder that can be written" in found[2].text
    assert found[0] == Finding(
        "fail", "driver", "no NVIDIA driver is loaded", "install NVIDIA's driver 580 or later"
    )


@pytest.mark.usefixtures("bare")
def test_a_machine_that_computes_on_a_cpu_has_no_such_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the setting, or because it has no GPU. Beside a GPU that torch cannot use they warn."""
    assert not list(gpu_findings("cpu", facts("13.0", finds_gpu=True)))
    monkeypatch.setattr(gpu, "has_nvidia_gpu", lambda: False)
    assert not list(gpu_findings("auto", facts("13.0", finds_gpu=False)))
    monkeypatch.setattr(gpu, "has_nvidia_gpu", lambda: True)
    found = list(gpu_findings("auto", facts("13.0", finds_gpu=False)))
    assert [(each.name, each.status) for each in found] == [(name, "warn") for name in NAMES]


@pytest.mark.parametrize("kind", [CLOSED, OPEN])
@pytest.mark.parametrize(
    ("version", "cuda", "finds_gpu", "status", "text"),
    [
        ("580.95.05", "13.0", True, "ok", "NVIDIA 580.95.05, torch for CUDA 13.0 needs 580"),
        ("550.54.15", "13.0", False, "fail", "NVIDIA 550.54.15, torch for CUDA 13.0 needs 580"),
        ("550.54.15", "12.8", False, "ok", "NVIDIA 550.54.15, torch for CUDA 12.8 needs 525"),
        ("550.54.15", "13.0", True, "ok", "NVIDIA 550.54.15"),  # with NVIDIA's package for that
        ("390.157", "99.1", True, "ok", "NVIDIA 390.157"),
    ],
)
def test_the_driver_is_compared_with_the_cuda_of_torch(
    driver: Path, kind: str, version: str, cuda: str, *, finds_gpu: bool, status: str, text: str
) -> None:
    """The first lines of both kinds of NVIDIA's kernel module are read."""
    driver.write_text(_LINE.format(kind, version))
    found = check_driver(facts(cuda, finds_gpu=finds_gpu))
    assert (found.status, found.text[: len(text)]) == (status, text)
    assert bool(found.action) == (status == "fail")


@pytest.mark.usefixtures("driver")
def test_a_gpu_without_a_file_of_the_driver_is_fine() -> None:
    """Windows' subsystem for Linux has none."""
    assert check_driver(facts("13.0", finds_gpu=True)).status == "ok"


@pytest.mark.usefixtures("bare")
def test_without_triton_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server runs, slowly."""
    monkeypatch.setitem(sys.modules, "triton", None)
    found = list(gpu_findings("cuda", facts("13.0", finds_gpu=True)))
    assert [(each.name, each.status) for each in found] == [("driver", "ok"), ("triton", "warn")]


@pytest.mark.usefixtures("bare")
def test_the_command_has_a_line_for_each() -> None:
    """They stand behind the device, and the code is 2."""
    ended = run_here("doctor", "--port", "0", "--device", "cuda")
    assert ended.returncode == 2
    lines = [re.split("  +", line[6:])[0] for line in ended.stdout.splitlines()]
    behind = lines.index("device") + 1
    assert lines[behind : behind + 3] == NAMES


def test_the_least_capability_is_that_of_the_attention() -> None:
    """The module of the attention imports Triton, which the doctor does not."""
    pytest.importorskip("triton")
    from ropewalk.model_runtime.gpu import flash

    assert packages.LEAST_CAPABILITY == flash._LEAST_CAPABILITY
