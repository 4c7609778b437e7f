"""The meaning of an exception of a step, for its memory and for the device."""

import torch

# A shortage that torch reports as an error of CUDA, because another allocator than its own met it.
_DEVICE_SHORTAGES = ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; a CPU allocator raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "can't allocate memory" in text or text.startswith(_DEVICE_SHORTAGES)


def is_device_fault(error: Exception) -> bool:
    """Return whether a device reports that it failed, after which it may never work again.

    CUDA reports an illegal access with any later call, and then with every one of the process.
    """
    if is_out_of_memory(error):
        return False
    is_cuda = isinstance(error, RuntimeError) and str(error).startswith("CUDA error: ")
    return is_cuda or isinstance(error, torch.AcceleratorError)
