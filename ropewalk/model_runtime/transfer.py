"""The current device of a thread, and transfers from the host to a device."""

from typing import Any

import torch
from torch import Tensor


def make_current(device: torch.device) -> None:
    """Make a GPU the calling thread's current device, on which Triton launches."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """Return a numpy array as a tensor; on a CPU it shares the array's memory.

    A copy to a GPU is asynchronous and comes from pinned memory, which torch keeps until it is
    done. A copy from ordinary memory would wait for all queued work of the GPU.
    """
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, numbers: Any) -> None:
    """Copy a numpy array into an existing tensor in the same way."""
    tensor = torch.from_numpy(numbers)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until the current stream has run all queued work; a CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
