"""Functions and constants that several of the GPU's kernels use. Importing it imports triton.

In kernels, names in capitals are compile-time constants. A size that ends in _2 is a power of two,
not below the size of the same name without _2.
"""

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.gpu.launch import jit

LOG2_E = math.log2(math.e)
KERNEL_LOG2_E = tl.constexpr(LOG2_E)  # a kernel can read a global only if it is a constexpr
KERNEL_LN_2 = tl.constexpr(math.log(2))
_LEAST = 16  # rows and columns of the smallest matrix product


def padded(size: int, least: int = _LEAST) -> int:
    """Return the next power of two from `size` on, at least `least`, as a kernel's block size."""
    # Not triton's function, which takes three microseconds of a launch.
    return max(least, 1 << max(0, size - 1).bit_length())


def tile_len(most: int, width: int, dtype: torch.dtype) -> int:
    """Return the number of rows that a program holds at once, a power of two.

    It is `most` for rows of 128 bfloat16 values, and fewer for larger rows. The sizes come from the
    compiler's report of register use (tests/gpu_targets.py).
    """
    return max(_LEAST, min(most, most * 256 // (padded(width) * dtype.itemsize)))


def key_strides(keys_NKDO: Tensor) -> tuple[int, ...]:
    """Return the strides by page, head, offset and dimension."""
    return tuple(keys_NKDO.stride(at) for at in (0, 1, 3, 2))


def scale_tensors(scales: Scales | None, unused: Any = None) -> tuple[Any, Any]:
    """Return the scales of keys and values as a kernel's arguments; `unused` without scales."""
    return (unused, unused) if scales is None else (scales.key_KD, scales.value_KV)


@jit
def bounded(numbers, most):
    """Return numbers no larger than `most`, whatever their sign; NaN stays NaN."""
    return tl.where(numbers > most, most, tl.where(numbers < -most, -most, numbers))


@jit
def product(a, b, acc, WIDE: tl.constexpr):
    """Return acc + a @ b, float32. WIDE: the rounded operands are first widened to float32."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
def row(at, mask, WHOLE: tl.constexpr):
    """Load the values at `at`. WHOLE: the mask hides nothing and is not used."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0.0)


@jit
def angles(start_cos, start_sin, offset_cos, offset_sin, start_at, offset_at, mask):
    """Return cosine and sine of page start + offset, from the places of both in their tables."""
    a = tl.load(start_cos + start_at, mask=mask, other=0.0)
    b = tl.load(start_sin + start_at, mask=mask, other=0.0)
    c = tl.load(offset_cos + offset_at, mask=mask, other=0.0)
    d = tl.load(offset_sin + offset_at, mask=mask, other=0.0)
    return a * c - b * d, b * c + a * d


@jit
def capped(scores, softcap):
    """Return softcap x tanh(scores / softcap), in units of log base 2."""
    return (KERNEL_LOG2_E * softcap) * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
