"""The build of torch beside the machine's GPU: whether one of them is there for nothing.

This module does not import torch. The banner of `serve` and `ropewalk doctor` use it.
"""

from dataclasses import dataclass

from ropewalk.model_runtime.gpu_nodes import NVIDIA_NODES, is_there


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Facts about an installed torch, as it states them."""

    version: str
    cuda: str | None  # the version of CUDA that it was built for
    hip: str | None  # the same for AMD's ROCm
    finds_gpu: bool

    def kind(self) -> str:
        if self.cuda is not None:
            return f"CUDA {self.cuda}"
        return "the CPU only" if self.hip is None else f"ROCm {self.hip}"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A build that does not fit the machine, and what the user can do."""

    text: str
    action: str


def has_nvidia_gpu() -> bool:
    """Return whether the driver of an NVIDIA GPU has made its device node."""
    return is_there(NVIDIA_NODES)


def mismatch(build: TorchBuild, *, has_node: bool) -> Mismatch | None:
    """Return how the build and the machine differ, or None."""
    if build.cuda is not None and not build.finds_gpu:
        if has_node:
            return Mismatch(
                f"torch {build.version} finds no GPU, although an NVIDIA driver is here",
                "see what `nvidia-smi` says, and install a torch for the driver's CUDA",
            )
        return Mismatch(
            f"torch {build.version} brings gigabytes of CUDA, and there is no GPU",
            "a CPU build of torch does the same here and is far smaller (docs/guide/install.md)",
        )
    if build.cuda is None and build.hip is None and has_node:
        return Mismatch(
            f"torch {build.version} is built for the CPU only, and there is an NVIDIA GPU",
            "install a CUDA build of torch to use it (docs/guide/install.md)",
        )
    return None
