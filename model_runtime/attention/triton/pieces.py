"""Common functions of the GPU's kernels. Importing this file imports triton.

In kernels, names in capitals are compile-time constants. A size that ends in _2 is a power of two,
not below the size of the same name without _2.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
KERNEL_LOG2_E = tl.constexpr(LOG2_E)  # a kernel can read a global only if it is a constexpr
KERNEL_LN_2 = tl.constexpr(math.log(2))
_LEAST = 16  # rows and columns of the smallest matrix product


@overload
def jit(function: Callable[..., Any], /) -> Any: ...


@overload
def jit(*by_request: str) -> Callable[[Callable[..., Any]], Any]: ...


def jit(*by_request: Any) -> Any:
    """Compile for the GPU; use Triton's interpreter if TRITON_INTERPRET was set before.

    `@jit("num_keys", "page_table")` names the arguments that change from request to request. By
    default, Triton compiles a kernel again for every kind of integer (1, multiples of 16, others)
    and of address (multiples of 16 bytes or not). All requests would wait for it. Named arguments
    have one kind. Others keep theirs, because aligned rows of keys are loaded in fewer
    instructions. `@jit` alone names none. Raises ValueError for a name that the kernel lacks.
    """
    if len(by_request) == 1 and callable(by_request[0]):
        return triton.jit(by_request[0])

    def compiled(function: Callable[..., Any]) -> Any:
        lacking = set(by_request) - set(inspect.signature(function).parameters)
        if lacking:
            raise ValueError(f"{function.__name__} has no argument {sorted(lacking)}")
        return triton.jit(
            function, do_not_specialize=by_request, do_not_specialize_on_alignment=by_request
        )

    return compiled


def is_interpreted() -> bool:
    """Return whether kernels run in the interpreter, which has no products of bfloat16."""
    return bool(triton.knobs.runtime.interpret)


def _let_interpreter_count() -> None:
    """Make `range` work in Triton 3.6's interpreter with numpy 2.5 and later.

    The interpreter converts a numpy array [1] to an int, which numpy refuses from 2.5 on. Triton's
    compiler does not do so, and Triton 3.7 converts in another way.
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
    """Return the next power of two from `size` on, at least `least`, as a kernel's block size."""
    return max(least, int(triton.next_power_of_2(size)))


def tile_len(most: int, width: int, dtype: torch.dtype) -> int:
    """Return the number of rows that a program holds at once, a power of two.

    It is `most` for rows of 128 bfloat16 values, and fewer for larger rows. The sizes come from the
    compiler's report of register use (tests/hopper.py).
    """
    return max(_LEAST, min(most, most * 256 // (padded(width) * dtype.itemsize)))


def key_strides(keys_NKDO: Tensor) -> tuple[int, ...]:
    """Return the strides by page, head, offset and dimension."""
    return tuple(keys_NKDO.stride(at) for at in (0, 1, 3, 2))


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
