"""The GPU's kernels that write new keys and values to exact pages, and quantise full ones.

A record has the bytes that `cpu_kernels/quantised/quantise.py` gives it. Every operation is the one
of float32 that numpy has, in the same order. Divisions are rounded to nearest (`div_rn`).

An exact page of one head has its keys offset by offset, then its values. Rows are channels of keys,
or groups of a token's values. With two parts, each half of a row has parameters of its own.

Shapes: T = flat tokens, K = key heads, D = key dimensions, V = value dimensions, X = tail pages,
G = staged pages, E = numbers of an exact page of one head, F = tokens that fill a page.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.primitives import padded
from ropewalk.model_runtime.gpu.quantised_numbers import Records

_LEAST_STEP = tl.constexpr(2.0**-14)  # the least and the largest normal number of float16
_MOST = tl.constexpr(65504.0)
_NAN_BITS = tl.constexpr(0x7E00)
_SIGN = tl.constexpr(0x8000)
_WHOLE = tl.constexpr(1.5 * 2**23)  # its neighbours are whole numbers, so a sum is rounded to one
_NUMBERS = 2048  # of each half of the rows that a program holds at once


@jit("own_T", "offset_T")
def _write(
    key, value, own_T, offset_T, tails, staged,
    from_key_t, from_key_k, from_key_d, from_value_t, from_value_k, from_value_v,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    HEADS_2: tl.constexpr, DIM_2: tl.constexpr, VALUES_2: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values to its own page, all heads."""
    token = tl.program_id(0).to(tl.int64)
    code, offset = -1 - tl.load(own_T + token), tl.load(offset_T + token)
    is_tail = code % 2 == 0
    k = tl.arange(0, HEADS_2)[:, None]
    d, v = tl.arange(0, DIM_2)[None, :], tl.arange(0, VALUES_2)[None, :]
    is_key, is_value = (k < HEADS) & (d < DIM), (k < HEADS) & (v < VALUES)
    one = tl.load(key + token * from_key_t + k * from_key_k + d * from_key_d, mask=is_key)
    two = tl.load(value + token * from_value_t + k * from_value_k + v * from_value_v, mask=is_value)
    page = (code // 2 * HEADS + k) * (PAGE * (DIM + VALUES))
    place = page + offset * DIM + d
    tl.store(tails + place, one, mask=is_key & is_tail)
    tl.store(staged + place, one, mask=is_key & (code % 2 == 1))
    place = page + PAGE * DIM + offset * VALUES + v
    tl.store(tails + place, two, mask=is_value & is_tail)
    tl.store(staged + place, two, mask=is_value & (code % 2 == 1))


@triton.jit
def _numbers_at(tails, staged, at, mask, is_tail):
    """Load numbers of a tail page, or of a staged one."""
    one = tl.load(tails + at, mask=mask & is_tail, other=0.0)
    two = tl.load(staged + at, mask=mask & (is_tail == 0), other=0.0)
    return tl.where(is_tail, one, two).to(tl.float32)


@triton.jit
def _quantise_rows(
    tails, staged, is_tail, first, row_step: tl.constexpr, step: tl.constexpr,
    record, halves,
    COUNT: tl.constexpr, LENGTH: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr,
    PARAMETERS: tl.constexpr, ROWS: tl.constexpr, HALF_2: tl.constexpr,
):  # fmt: skip
    """Quantise COUNT rows of LENGTH numbers, each as two halves.

    `first`: the place of the first number. PARAMETERS: the place of the first lowest number among
    the halves.
    """
    HALF: tl.constexpr = (LENGTH + 1) // 2
    most: tl.constexpr = 2**BITS - 1
    x = tl.arange(0, HALF_2)[None, :]
    for begin in range(0, COUNT, ROWS):
        r = begin + tl.arange(0, ROWS)
        is_row = r < COUNT
        at = first + r[:, None] * row_step + x * step
        is_a = is_row[:, None] & (x < HALF)
        is_b = is_a & (x + HALF < LENGTH)
        a = _numbers_at(tails, staged, at, is_a, is_tail)
        b = _numbers_at(tails, staged, at + HALF * step, is_b, is_tail)
        low, high, is_finite = _range(a, is_a)
        other_low, other_high, is_other_finite = _range(b, is_b)
        if PARTS == 1:
            is_finite = is_finite & is_other_finite
            is_other_finite = is_finite
            low = tl.where(is_finite, tl.minimum(low, other_low), 0.0)
            high = tl.where(is_finite, tl.maximum(high, other_high), 0.0)
        place = halves + PARAMETERS + r
        low, inverse = _store_parameters(
            place, low, high, is_finite, is_row, COUNT * PARTS, most, ROWS
        )
        if PARTS == 2:
            other_low, other_inverse = _store_parameters(
                place + COUNT, other_low, other_high, is_other_finite, is_row, COUNT * PARTS, most,
                ROWS,
            )  # fmt: skip
        else:
            other_low, other_inverse = low, inverse
        a = tl.where(is_finite[:, None], a, 0.0)
        b = tl.where(is_other_finite[:, None], b, 0.0)
        a = _codes(a, low[:, None], inverse[:, None], most)
        b = _codes(b, other_low[:, None], other_inverse[:, None], most)
        if BITS == 4:
            place = record + r[:, None] * HALF + x
            tl.store(place, (a | (b << 4)).to(tl.uint8), mask=is_a)
        else:
            place = record + r[:, None] * LENGTH + x
            tl.store(place, a.to(tl.uint8), mask=is_a)
            tl.store(place + HALF, b.to(tl.uint8), mask=is_b)


@triton.jit
def _range(numbers, mask):
    """Return the lowest and the highest number of rows, and whether all are finite.

    Both are 0 if one is not.
    """
    is_number = tl.abs(numbers) < float("inf")  # a NaN is not less
    is_finite = tl.min(is_number.to(tl.int32), 1) == 1
    low = tl.min(tl.where(mask, numbers, float("inf")), 1)
    high = tl.max(tl.where(mask, numbers, float("-inf")), 1)
    return tl.where(is_finite, low, 0.0), tl.where(is_finite, high, 0.0), is_finite


@triton.jit
def _store_parameters(
    at, low, high, is_finite, mask, from_low_to_step: tl.constexpr, most: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Store lowest numbers and steps; return the rounded ones, and one by the rounded steps."""
    # Down: a code is not negative, so numbers below a lowest number would all be read as it.
    exact = tl.minimum(tl.maximum(low, -_MOST), _MOST)
    half = exact.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    below = tl.where(bits >= _SIGN, bits + 1, bits - 1)
    bits = tl.where(half.to(tl.float32) > exact, below, bits)
    low = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    span = tl.div_rn(high - low, tl.full([ROWS], most, tl.float32))
    half = tl.minimum(tl.maximum(span, _LEAST_STEP), _MOST).to(tl.float16)
    step_bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    step_bits = tl.where(is_finite, step_bits, _NAN_BITS)
    tl.store(at, bits.to(tl.int16), mask=mask)
    tl.store(at + from_low_to_step, step_bits.to(tl.int16), mask=mask)
    return low, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), half.to(tl.float32))


@triton.jit
def _codes(numbers, low, inverse, most: tl.constexpr):
    """Return the nearest codes of numbers, int32; ties go to the even one."""
    scaled = tl.minimum(tl.maximum((numbers - low) * inverse, 0.0), most)
    return ((scaled + _WHOLE) - _WHOLE).to(tl.int32)


@jit("filled", "own_T", "offset_T", "page_T")
def _quantise(
    tails, staged, records, halves, filled, own_T, offset_T, page_T,
    HEADS: tl.constexpr, RECORD: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr,
    PAGE: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, GROUPS: tl.constexpr,
    KEY_ROWS: tl.constexpr, KEY_HALF_2: tl.constexpr,
    VALUE_ROWS: tl.constexpr, VALUE_HALF_2: tl.constexpr,
):  # fmt: skip
    """Quantise one head of the page that a token has filled, if its offset is the last one."""
    token, head = tl.load(filled + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    if tl.load(offset_T + token) != PAGE - 1:
        return
    code = -1 - tl.load(own_T + token)
    is_tail = code % 2 == 0
    first = (code // 2 * HEADS + head) * (PAGE * (DIM + VALUES))
    place = (tl.load(page_T + token) * HEADS + head) * RECORD
    record, halves = records + place, halves + place // 2
    SIZE: tl.constexpr = VALUES // GROUPS
    VALUES_AT: tl.constexpr = PAGE * DIM * KEY_BITS // 8
    PARAMETERS: tl.constexpr = (VALUES_AT + PAGE * VALUES * VALUE_BITS // 8) // 2
    PARTS: tl.constexpr = 2 if KEY_BITS == 4 else 1
    _quantise_rows(
        tails, staged, is_tail, first, 1, DIM, record, halves,
        DIM, PAGE, PARTS, KEY_BITS, PARAMETERS, KEY_ROWS, KEY_HALF_2,
    )  # fmt: skip
    _quantise_rows(
        tails, staged, is_tail, first + PAGE * DIM, SIZE, 1, record + VALUES_AT, halves,
        PAGE * GROUPS, SIZE, 1, VALUE_BITS, PARAMETERS + 2 * DIM * PARTS, VALUE_ROWS,
        VALUE_HALF_2,
    )  # fmt: skip


def write(
    key_TKD: Tensor,
    value_TKV: Tensor,
    own_T: Tensor,
    offset_T: Tensor,
    tail_XKE: Tensor,
    staged_GKE: Tensor,
    page_size: int,
) -> None:
    """Write the step's keys and values to each token's own page."""
    num_tokens, num_heads, dim = key_TKD.shape
    value_dim = value_TKV.shape[-1]
    _write[(num_tokens,)](
        key_TKD, value_TKV, own_T, offset_T, tail_XKE, staged_GKE,
        *key_TKD.stride(), *value_TKV.stride(),
        HEADS=num_heads, DIM=dim, VALUES=value_dim, PAGE=page_size,
        HEADS_2=padded(num_heads, 1), DIM_2=padded(dim), VALUES_2=padded(value_dim),
    )  # fmt: skip


def quantise(
    records: Records,
    tail_XKE: Tensor,
    staged_GKE: Tensor,
    filled_F: Tensor,
    own_T: Tensor,
    offset_T: Tensor,
    page_T: Tensor,
    sides: tuple[int, int, int],
) -> None:
    """Quantise the pages of the tokens `filled_F` that stand at a last offset.

    `sides`: D, V and the positions of a page.
    """
    dim, value_dim, page_size = sides
    size = value_dim // records.value_groups
    key_half, value_half = padded(-(-page_size // 2)), padded(-(-size // 2))
    _, num_heads, record_bytes = records.records_NKR.shape
    _quantise[(len(filled_F), num_heads)](
        tail_XKE, staged_GKE, records.records_NKR, records.records_NKR.view(torch.int16),
        filled_F, own_T, offset_T, page_T,
        HEADS=num_heads, RECORD=record_bytes, DIM=dim, VALUES=value_dim, PAGE=page_size,
        **records.form,
        KEY_ROWS=_rows(dim, key_half), KEY_HALF_2=key_half,
        VALUE_ROWS=_rows(page_size * records.value_groups, value_half), VALUE_HALF_2=value_half,
    )  # fmt: skip


def _rows(count: int, half: int) -> int:
    return min(padded(count), max(1, _NUMBERS // half))
