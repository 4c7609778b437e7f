"""Compiled passes over rows: RMSNorm and the gate of a feed-forward block.

Every row is computed by the same code, whatever other rows there are. Its bits therefore do not
depend on the batch. Sums are float32.

Shapes: R = rows, D = dimensions of a row or of one head, C = columns that hold head beside head,
I = dimensions between the products of a block, G = both halves of them.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.kernel_arguments import Floats, Numbers
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    add,
    broadcast,
    divide,
    exp,
    fma,
    load,
    maximum,
    multiply,
    reduce_add,
    store,
    subtract,
)
from ropewalk.model_runtime.cpu_kernels.threads import parallel_for


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


_NUMBERS_PER_SHARE = 1 << 17  # with fewer, starting a thread costs more time than it saves


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
def normalize(x_RD: Numbers, scale_D: Floats, eps: np.float32, out_RD: Numbers) -> None:
    """Write the RMSNorm of each row to `out_RD`, which may be `x_RD`."""
    row_D = np.empty(x_RD.shape[1], np.float32)
    for r in range(x_RD.shape[0]):
        widen(x_RD[r], row_D)
        _scale(row_D, scale_D, eps)
        narrow(row_D, out_RD[r])


@jit()
def add_and_normalize(
    x_RD: Numbers, other_RD: Numbers, scale_D: Floats, eps: np.float32, out_RD: Numbers
) -> None:
    """Add `other_RD` to `x_RD` in place, and write the RMSNorm of the sum to `out_RD`."""
    row_D = np.empty(x_RD.shape[1], np.float32)
    other_D = np.empty(x_RD.shape[1], np.float32)
    for r in range(x_RD.shape[0]):
        widen(x_RD[r], row_D)
        widen(other_RD[r], other_D)
        for d in range(row_D.shape[0]):
            row_D[d] += other_D[d]
        narrow(row_D, x_RD[r])
        widen(x_RD[r], row_D)  # the rounded sum, as in the model
        _scale(row_D, scale_D, eps)
        narrow(row_D, out_RD[r])


@jit()
def normalize_heads(
    x_RC: Numbers, at: int, num_heads: int, scale_D: Floats, eps: np.float32
) -> None:
    """Normalize each head of each row in place; heads are side by side from column `at` on."""
    dim = scale_D.shape[0]
    row_D = np.empty(dim, np.float32)
    for r in range(x_RC.shape[0]):
        for begin in range(at, at + num_heads * dim, dim):
            widen(x_RC[r, begin : begin + dim], row_D)
            _scale(row_D, scale_D, eps)
            narrow(row_D, x_RC[r, begin : begin + dim])


@jit()
def gate(both_RG: Numbers, out_RI: Numbers, begin: int, end: int) -> None:
    """Compute silu(first half) * second half for rows `begin` to `end` - 1.

    silu(x) = x / (1 + e^-x). Values of x below -87 are taken for -87, which leaves about 1e-36.
    """
    width = out_RI.shape[1]
    row_I = np.empty(width, np.float32)
    none, one = broadcast(np.float32(0.0)), broadcast(np.float32(1.0))
    least = broadcast(np.float32(-87.0))
    for r in range(begin, end):
        at = r * 2 * width
        for i in range(0, width, WIDTH):
            x, up = load(both_RG, at + i), load(both_RG, at + width + i)
            x = maximum(least, x)
            below = add(one, exp(subtract(none, x)))
            store(row_I, i, multiply(divide(x, below), up))
        narrow(row_I, out_RI[r])


def gated(both_RG: Numbers) -> Numbers:
    """Return silu(first half) * second half, [R, G] -> [R, I]; I is a multiple of WIDTH.

    The arrays are float32 or bf16's bits.
    """
    num_rows, width = len(both_RG), both_RG.shape[1] // 2
    out_RI = np.empty((num_rows, width), both_RG.dtype)
    most = max(1, min(num_rows, num_rows * width // _NUMBERS_PER_SHARE))
    num_shares = min(torch.get_num_threads(), most)
    edges = [num_rows * share // num_shares for share in range(num_shares + 1)]
    parallel_for(lambda share: gate(both_RG, out_RI, *share), list(pairwise(edges)))
    return out_RI
