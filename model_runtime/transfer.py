"""Numbers on their way from the host to a device."""

from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """A numpy array as a tensor; on a CPU it shares the array's memory.

    A GPU takes it when it comes to that, from pinned memory, which torch keeps until then: a copy
    from ordinary memory would wait for all that the GPU has still to do.
    """
    tensor = torch.from_numpy(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, numbers: Any) -> None:
    """The same into a tensor that is there."""
    tensor = torch.from_numpy(numbers)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Until all that was queued on the current stream is done; a CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
