"""The numbers of sealed pages in a GPU's kernels: codes, steps and lowest numbers to float32.

A record is that of `cpu_kernels/sealed/records.py`, byte for byte. A code times its step has at
most 19 bits, so the sum with the lowest number is rounded once, as on a CPU.

Shapes: N = sealed pages, K = key heads, R = bytes of a record.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}  # of the exact numbers


@dataclass(frozen=True)
class Records:
    """The sealed pages of a layer, as kernels take them."""

    records_NKR: Tensor  # uint8
    key_bits: int
    value_bits: int
    value_groups: int  # steps of a token's value

    @cached_property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Return the pages as bytes, and as float16."""
        return self.records_NKR, self.records_NKR.view(torch.float16)

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the strides in bytes by page, head, offset and dimension; twice.

        An offset and a dimension have none that a format does not know.
        """
        return (*self.records_NKR.stride()[:2], 0, 0) * 2

    @property
    def form(self) -> dict[str, int]:
        """Return the constants of the format."""
        return {
            "KEY_BITS": self.key_bits, "VALUE_BITS": self.value_bits, "GROUPS": self.value_groups,
        }  # fmt: skip


@triton.jit
def _widened(
    record, at, shift, lows, steps, mask, BITS: tl.constexpr, WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return code * step + lowest number, float32; four bits are those from `shift` on.

    MASKED: the mask is also that of the lowest numbers and the steps, which may be fewer.
    """
    if WHOLE:
        code = tl.load(record + at).to(tl.int32)
    else:
        code = tl.load(record + at, mask=mask, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> shift) & 15
    if MASKED and not WHOLE:
        low = tl.load(lows, mask=mask, other=0.0).to(tl.float32)
        step = tl.load(steps, mask=mask, other=0.0).to(tl.float32)
    else:
        low, step = tl.load(lows).to(tl.float32), tl.load(steps).to(tl.float32)
    return code.to(tl.float32) * step + low


@triton.jit
def sealed_keys(
    record, halves, offset, d, mask,
    DIM: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the keys at these offsets [T, 1] in these dimensions [1, D], before rotation."""
    LENGTH: tl.constexpr = PAGE * KEY_BITS // 8  # bytes of a channel
    LOWS: tl.constexpr = (DIM * LENGTH + PAGE * VALUES * VALUE_BITS // 8) // 2
    lows = halves + (LOWS + d)
    return _widened(
        record, d * LENGTH + offset % LENGTH, offset // LENGTH * 4, lows, lows + DIM, mask,
        KEY_BITS, WHOLE, MASKED=True,
    )  # fmt: skip


@triton.jit
def sealed_values(
    record, halves, offset, v, mask,
    DIM: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the values at these offsets [T, 1] in these dimensions [1, V]."""
    SIZE: tl.constexpr = VALUES // GROUPS  # dimensions that share a step
    LENGTH: tl.constexpr = SIZE * VALUE_BITS // 8
    FIRST: tl.constexpr = DIM * PAGE * KEY_BITS // 8
    LOWS: tl.constexpr = (FIRST + PAGE * VALUES * VALUE_BITS // 8) // 2 + 2 * DIM
    line, inside = offset, v
    if GROUPS > 1:
        line, inside = offset * GROUPS + v // SIZE, v % SIZE
    at = FIRST + line * LENGTH + inside % LENGTH
    lows = halves + (LOWS + line)
    return _widened(
        record, at, inside // LENGTH * 4, lows, lows + PAGE * GROUPS, mask, VALUE_BITS, WHOLE,
        GROUPS > 1,
    )  # fmt: skip
