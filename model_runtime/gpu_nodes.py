"""The device nodes of GPU drivers on Linux, which tell of a GPU without torch."""

from pathlib import Path

# The nodes of NVIDIA's driver, and of Windows' subsystem for Linux.
NVIDIA_NODES = ("/dev/nvidiactl", "/dev/dxg")
GPU_NODES = (*NVIDIA_NODES, "/dev/kfd")  # AMD's


def is_there(nodes: tuple[str, ...]) -> bool:
    return any(Path(node).exists() for node in nodes)
