"""Convert the errors of a model load into one sentence for the operator.

torch, transformers, numba and a checkpoint's own code raise errors of any type. A load converts
them to a ModelError in this one place. It names dtype, device, reason and another setting to try.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ropewalk.model_runtime.errors import ModelError, RopewalkError


@contextmanager
def faults_of(what: str, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Convert any error of the block into a ModelError about `what`, with the original as cause."""
    try:
        yield
    except RopewalkError:
        raise
    except Exception as error:
        raise ModelError(_sentence(what, dtype, device, error)) from error


def _sentence(what: str, dtype: torch.dtype, device: torch.device, error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    name = str(dtype).removeprefix("torch.")
    setting = f"{what} cannot be served with dtype {name} on device {device}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"{setting}: there is no memory for it ({first_line or 'out of memory'})"
    reason = f"{setting}: {type(error).__name__}: {first_line}"
    if dtype != torch.float32:
        return f"{reason}; try dtype float32"
    return reason if device.type == "cpu" else f"{reason}; try device cpu"
