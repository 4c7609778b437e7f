"""The numbers of quantised pages in a GPU's kernels: codes, steps and lowest numbers to float32.

A record is that of `cpu_kernels/quantised/records.py`, byte for byte. A code times its step has at
most 19 bits, so the sum with the lowest number is rounded once, as on a CPU.

Shapes: N = quantised pages, K = key heads, R = bytes of a record.
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
    """The quantised pages of a layer, as kernels take them."""

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
def _codes(record, at, shift, mask, BITS: tl.constexpr, WHOLE: tl.constexpr):
    """Return codes as float32; four bits are those from `shift` on."""
    if WHOLE:
        code = tl.load(record + at).to(tl.int32)
    else:
        code = tl.load(record + at, mask=mask, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> shift) & 15
    return code.to(tl.float32)


@triton.jit
def _parameters(lows, steps, mask, WHOLE: tl.constexpr):
    """Return lowest numbers and steps, float32."""
    if WHOLE:
        low, step = tl.load(lows), tl.load(steps)
    else:
        low = tl.load(lows, mask=mask, other=0.0)
        step = tl.load(steps, mask=mask, other=0.0)
    return low.to(tl.float32), step.to(tl.float32)


@triton.jit
def quantised_keys(
    record, halves, offset, d, mask,
    DIM: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the keys at these offsets [T, 1] in these dimensions [1, D], before rotation."""
    LENGTH: tl.constexpr = PAGE * KEY_BITS // 8  # bytes of a channel
    LOWS: tl.constexpr = (DIM * LENGTH + PAGE * VALUES * VALUE_BITS // 8) // 2
    ROWS: tl.constexpr = 2 * DIM if KEY_BITS == 4 else DIM
    at, shift = d * LENGTH + offset % LENGTH, offset // LENGTH * 4
    code = _codes(record, at, shift, mask, KEY_BITS, WHOLE)
    lows = halves + (LOWS + d)
    low, step = _parameters(lows, lows + ROWS, mask, WHOLE)
    if KEY_BITS == 4:  # two loads of a row and a choice are less than a load for each offset
        upper_low, upper_step = _parameters(lows + DIM, lows + (ROWS + DIM), mask, WHOLE)
        low = tl.where(offset >= LENGTH, upper_low, low)
        step = tl.where(offset >= LENGTH, upper_step, step)
    return code * step + low


@triton.jit
def quantised_values(
    record, halves, offset, v, mask,
    DIM: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the values at these offsets [T, 1] in these dimensions [1, V]."""
    SIZE: tl.constexpr = VALUES // GROUPS  # dimensions that share a step
    LENGTH: tl.constexpr = SIZE * VALUE_BITS // 8
    FIRST: tl.constexpr = DIM * PAGE * KEY_BITS // 8
    KEYS: tl.constexpr = 4 * DIM if KEY_BITS == 4 else 2 * DIM  # parameters of keys
    LOWS: tl.constexpr = (FIRST + PAGE * VALUES * VALUE_BITS // 8) // 2 + KEYS
    line, inside = offset, v
    if GROUPS > 1:
        line, inside = offset * GROUPS + v // SIZE, v % SIZE
    at = FIRST + line * LENGTH + inside % LENGTH
    lows = halves + (LOWS + line)
    code = _codes(record, at, inside // LENGTH * 4, mask, VALUE_BITS, WHOLE)
    # One group is that of all dimensions, so the mask of dimensions is not that of parameters.
    UNMASKED: tl.constexpr = WHOLE or GROUPS == 1
    low, step = _parameters(lows, lows + PAGE * GROUPS, mask, UNMASKED)
    return code * step + low
