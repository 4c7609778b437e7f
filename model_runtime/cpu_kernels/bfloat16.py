"""bfloat16 for numba and numpy, which lack it: uint16 arrays hold float32's upper 16 bits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor


def as_numpy(numbers: Tensor) -> Any:
    """Return a tensor's memory as a numpy array, without a copy; bfloat16 as its bits."""
    if numbers.requires_grad:
        numbers = numbers.detach()
    if numbers.dtype == torch.bfloat16:
        numbers = numbers.view(torch.uint16)
    return numbers.numpy()


def as_tensor(numbers: Any, dtype: torch.dtype) -> Tensor:
    """Return a numpy array's memory as a tensor of `dtype`, without a copy."""
    tensor = torch.from_numpy(numbers)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def widen(row: Any, out: Any) -> None:
    """Copy a row to float32; numba replaces it by an overload for the row's type."""
    raise NotImplementedError


def narrow(row: Any, out: Any) -> None:
    """Copy a float32 row to `out`, rounding to nearest even; numba replaces it, too."""
    raise NotImplementedError


def _copy(row: Any, out: Any) -> None:
    for d in range(row.shape[0]):
        out[d] = row[d]


@overload(widen)  # type: ignore[untyped-decorator]
def _overload_widen(row: Any, out: Any) -> Callable[..., None]:  # noqa: ARG001
    if row.dtype == types.uint16:

        def widen_bits(row: Any, out: Any) -> None:
            bits = out.view(np.uint32)
            for d in range(row.shape[0]):
                bits[d] = np.uint32(row[d]) << np.uint32(16)

        return widen_bits

    return _copy


@overload(narrow)  # type: ignore[untyped-decorator]
def _overload_narrow(row: Any, out: Any) -> Callable[..., None]:  # noqa: ARG001
    if out.dtype == types.uint16:

        def narrow_bits(row: Any, out: Any) -> None:
            bits = row.view(np.uint32)
            for d in range(row.shape[0]):
                odd = (bits[d] >> np.uint32(16)) & np.uint32(1)
                rounded = (bits[d] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
                is_nan = row[d] != row[d]
                out[d] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)

        return narrow_bits

    return _copy
