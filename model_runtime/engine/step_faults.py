"""The meaning of an exception of a step for its memory."""

import torch

# A shortage that another allocator than torch's own met.
_DEVICE_SHORTAGES = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; a CPU allocator raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "can't allocate memory" in text or text.startswith(_DEVICE_SHORTAGES)
