"""What the GPU's kernels are made of. Importing this file imports triton.

In kernels, names in capitals are known when they are compiled; a size that ends in _2 is a power
of two that holds the one before it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
KERNEL_LOG2_E = tl.constexpr(LOG2_E)  # kernels see no other kind of number from outside
_LEAST = 16  # rows and columns of the smallest matrix product


def jit(function: Callable[..., Any]) -> Any:
    """Compile for the GPU, or run by Triton's interpreter if TRITON_INTERPRET was set in time."""
    return triton.jit(function)


def is_interpreted() -> bool:
    """Whether kernels run by the interpreter, whose products do not know bfloat16."""
    return bool(triton.knobs.runtime.interpret)


def _let_interpreter_count() -> None:
    """Triton 3.6 asks numpy for the int of an array [1], which numpy refuses from 2.5 on.

    That is how its interpreter runs `range`; its compiler does not. 3.7 asks otherwise.
    """
    from triton.runtime import interpreter  # noqa: PLC0415  # nothing that a GPU needs

    patch_tensor = interpreter._patch_lang_tensor  # noqa: SLF001  # sets it anew for every launch

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch  # noqa: SLF001


if is_interpreted() and triton.__version__.startswith("3.6."):
    _let_interpreter_count()


def padded(size: int, least: int = _LEAST) -> int:
    """A power of two that holds `size`; what a kernel's blocks are made of."""
    return max(least, int(triton.next_power_of_2(size)))


def tile_len(most: int, width: int, dtype: torch.dtype) -> int:
    """Rows that a program holds at once: `most` of 128 bfloat16 numbers, fewer of wider ones.

    A power of two. Read off what the compiler says of registers (tests/hopper.py).
    """
    return max(_LEAST, min(most, most * 256 // (padded(width) * dtype.itemsize)))


def key_strides(keys_NKDO: Tensor) -> tuple[int, ...]:
    """By page, head, offset, dimension."""
    return tuple(keys_NKDO.stride(at) for at in (0, 1, 3, 2))


@jit
def product(a, b, total, WIDE: tl.constexpr):
    """total + a @ b, float32. WIDE: from operands widened to float32 after they were rounded."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@jit
def row(at, mask, WHOLE: tl.constexpr):
    """What stands there. WHOLE: the mask hides nothing, and is left out."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0.0)


@jit
def angles(start_cos, start_sin, offset_cos, offset_sin, start_at, offset_at, mask):
    """Cosine and sine of page start + offset, from the places of both in their tables."""
    a = tl.load(start_cos + start_at, mask=mask, other=0.0)
    b = tl.load(start_sin + start_at, mask=mask, other=0.0)
    c = tl.load(offset_cos + offset_at, mask=mask, other=0.0)
    d = tl.load(offset_sin + offset_at, mask=mask, other=0.0)
    return a * c - b * d, b * c + a * d


@jit
def capped(scores, softcap):
    """softcap x tanh(scores / softcap), as a logarithm to base 2."""
    return (KERNEL_LOG2_E * softcap) * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
