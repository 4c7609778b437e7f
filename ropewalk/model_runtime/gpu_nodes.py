"""GPUs without torch: the device nodes of drivers on Linux, and the kernels for a device."""

from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

# The nodes of NVIDIA's driver, and of Windows' subsystem for Linux.
NVIDIA_NODES = ("/dev/nvidiactl", "/dev/dxg")


class Device(Protocol):
    """A device of torch, or its name."""

    @property
    def type(self) -> str:
        """The kind, such as cuda."""


def has_gpu_kernels(device: Device) -> bool:
    """Return whether the kernels that triton compiles serve the device."""
    return device.type == "cuda" and find_spec("triton") is not None


def is_there(nodes: tuple[str, ...]) -> bool:
    return any(Path(node).exists() for node in nodes)
