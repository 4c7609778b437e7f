"""Compiled passes over rows: norms, activations and the gate of a feed-forward block.

Every row is computed by the same code, whatever other rows there are. Its bits therefore do not
depend on the batch. Sums are float32.

Shapes: R = rows, D = dimensions of a row or of one head, C = columns that hold head beside head,
I = dimensions between the products of a block, G = both halves of them.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.activations import activate
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    add,
    broadcast,
    fma,
    load,
    reduce_add,
)
from ropewalk.model_runtime.cpu_kernels.threads import even_shares, num_threads_for, run_shares


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


def as_cached(number: Any, cache: Any) -> Any:
    """Return a number as the array `cache` holds it; numba replaces it by an overload.

    A float32 number is rounded to nearest even if the cache is bfloat16.
    """
    raise NotImplementedError


@overload(as_cached)  # type: ignore[untyped-decorator]
def _overload_as_cached(number: Any, cache: Any) -> Callable[..., Any]:
    if number == types.float32 and cache.dtype == types.uint16:

        def rounded(number: Any, cache: Any) -> Any:  # noqa: ARG001
            if number != number:  # noqa: PLR0124  # NaN
                return np.uint16(0x7FC0)
            bits = np.float32(number).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return rounded

    def unchanged(number: Any, cache: Any) -> Any:  # noqa: ARG001
        return number

    return unchanged


_FLAT_BLOCK = 4096  # values that are activated together; they stay in the level-1 cache
_NUMBERS_PER_SHARE = 1 << 14  # with fewer, one more thread costs more time than it saves


@jit()
def _scale(row_D: Floats, scale_D: Floats, eps: np.float32) -> None:
    """Normalize one float32 row in place; the order of the sum does not depend on the compiler."""
    dim = row_D.shape[0]
    in_lanes = dim - dim % (4 * WIDTH)
    first = second = third = fourth = broadcast(np.float32(0.0))
    for d in range(0, in_lanes, 4 * WIDTH):
        x0, x1 = load(row_D, d), load(row_D, d + WIDTH)
        x2, x3 = load(row_D, d + 2 * WIDTH), load(row_D, d + 3 * WIDTH)
        first, second = fma(x0, x0, first), fma(x1, x1, second)
        third, fourth = fma(x2, x2, third), fma(x3, x3, fourth)
    squares = reduce_add(add(add(first, second), add(third, fourth)))
    for d in range(in_lanes, dim):
        squares += row_D[d] * row_D[d]
    factor = np.float32(1.0) / np.sqrt(squares / np.float32(dim) + eps)
    for d in range(dim):
        row_D[d] = row_D[d] * factor * scale_D[d]


@jit()
def _center(row_D: Floats, scale_D: Floats, shift_D: Floats, eps: np.float32) -> None:
    """Compute the LayerNorm of one float32 row in place, as `_scale` does."""
    dim = row_D.shape[0]
    in_lanes = dim - dim % (4 * WIDTH)
    first = second = third = fourth = broadcast(np.float32(0.0))
    for d in range(0, in_lanes, 4 * WIDTH):
        first, second = add(first, load(row_D, d)), add(second, load(row_D, d + WIDTH))
        third = add(third, load(row_D, d + 2 * WIDTH))
        fourth = add(fourth, load(row_D, d + 3 * WIDTH))
    total = reduce_add(add(add(first, second), add(third, fourth)))
    for d in range(in_lanes, dim):
        total += row_D[d]
    mean = total / np.float32(dim)
    for d in range(dim):
        row_D[d] -= mean
    _scale(row_D, scale_D, eps)
    for d in range(dim):
        row_D[d] += shift_D[d]


@jit()
def normalize_row(
    row_D: Floats, scale_D: Floats, shift_D: Floats, eps: np.float32, is_centered: int
) -> None:
    """Compute the LayerNorm of one float32 row in place, or its RMSNorm, which has no shift."""
    if is_centered:
        _center(row_D, scale_D, shift_D, eps)
    else:
        _scale(row_D, scale_D, eps)


@jit()
def normalize(
    x_RD: Numbers, scale_D: Floats, shift_D: Floats, eps: np.float32, is_centered: int,
    out_RD: Numbers,
) -> None:  # fmt: skip
    """Write the norm of each row to `out_RD`, which may be `x_RD`; see `normalize_row`."""
    row_D = np.empty(x_RD.shape[1], np.float32)
    for r in range(x_RD.shape[0]):
        widen(x_RD[r], row_D)
        normalize_row(row_D, scale_D, shift_D, eps, is_centered)
        narrow(row_D, out_RD[r])


@jit()
def activate_part(values_X: Numbers, kind: int, out_X: Numbers, begin: int, end: int) -> None:
    """Write the activations of values `begin` to `end` - 1 of a flat array."""
    row_I = np.zeros(_FLAT_BLOCK, np.float32)
    for first in range(begin, end, _FLAT_BLOCK):
        last = min(end, first + _FLAT_BLOCK)
        widen(values_X[first:last], row_I[: last - first])
        activate(row_I, kind)
        narrow(row_I[: last - first], out_X[first:last])


def activated(values_X: Numbers, kind: int) -> Numbers:
    """Return the activation of each value of a flat array, float32 or bf16's bits."""
    out_X = np.empty_like(values_X)
    shares = row_shares(len(values_X), len(values_X))
    run_shares(activate_part, shares, values_X, kind, out_X)
    return out_X


@jit()
def multiply_row(x_C: Numbers, other_C: Numbers) -> None:
    """Multiply a row by another one in place, rounded once."""
    row_C, factor_C = np.empty(len(x_C), np.float32), np.empty(len(x_C), np.float32)
    widen(x_C, row_C)
    widen(other_C, factor_C)
    for c in range(len(row_C)):
        row_C[c] *= factor_C[c]
    narrow(row_C, x_C)


def row_shares(num_rows: int, num_numbers: int) -> list[tuple[int, int]]:
    """Return ranges of rows for threads, as many as `num_numbers` of results are worth."""
    return even_shares(num_rows, 1, num_threads_for(num_numbers // _NUMBERS_PER_SHARE))
