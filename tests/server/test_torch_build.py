"""The build of torch beside the machine's GPU."""

import pytest
import torch

from ropewalk.server.process.torch_build import TorchBuild, mismatch
from ropewalk.server.startup.planning import banner_lines


@pytest.mark.parametrize(
    ("cuda", "finds_gpu", "has_node", "text"),
    [
        (None, False, False, None),
        ("13.0", True, True, None),
        ("13.0", False, False, "torch 2.13 brings gigabytes of CUDA, and there is no GPU"),
        ("13.0", False, True, "torch 2.13 finds no GPU, although an NVIDIA driver is here"),
        (None, False, True, "torch 2.13 is built for the CPU only, and there is an NVIDIA GPU"),
    ],
)
def test_a_build_fits_the_machine_or_a_sentence_says_why(
    cuda: str | None,
    finds_gpu: bool,  # noqa: FBT001
    has_node: bool,  # noqa: FBT001
    text: str | None,
) -> None:
    """CUDA without a GPU, a GPU without CUDA, and a driver that torch cannot use."""
    found = mismatch(TorchBuild("2.13", cuda, None, finds_gpu), has_node=has_node)
    assert (found and found.text) == text
    assert found is None or found.action


def test_the_banner_has_a_line_for_a_build_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A build that fits has no line."""
    monkeypatch.setattr(banner_lines, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert banner_lines._torch_lines() == []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (line,) = banner_lines._torch_lines()
    assert line.startswith("  warning          torch ")
    assert "there is no GPU; a CPU build of torch does" in line


def test_rocm_is_no_mismatch() -> None:
    """A build for AMD has no CUDA and needs no NVIDIA node."""
    build = TorchBuild("2.13", None, "6.4", finds_gpu=True)
    assert mismatch(build, has_node=True) is None
    assert build.kind() == "ROCm 6.4"
