"""Write new keys and values to tail pages, and quantise the pages that they fill.

A page is a pure function of its own numbers: no scale comes from another page, from a chunk or from
traffic. A page that is quantised again from the same numbers gets the same bytes.

Shapes: see `records.py`. Rows are the channels of keys, or the groups of tokens' values. Parts of a
row have parameters of their own.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    Destinations,
    Floats,
    Ints,
    Numbers,
    SequenceArrays,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import widen
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.quantised.records import (
    Bytes,
    QuantisedPages,
    Sides,
    key_rows,
)

_LEAST_STEP, _MOST = np.float32(2.0**-14), np.float32(65504.0)  # the normal numbers of float16
_UNITS = np.float32(2.0**24)  # of the numbers below them
_NAN_BITS = 0x7E00
_EXPONENTS = 112 << 10  # between a float32 without its last 13 bits, and a float16
_FOUR_BITS = 4


@jit(fuses=False)
def round_to_halves(numbers_P: Floats, halves_P: NDArray[np.uint16], is_down: bool) -> None:  # noqa: FBT001
    """Round numbers to float16, down or to nearest with ties to even: in place, and as bits.

    NaN stays NaN, and other numbers are within the range of float16.
    """
    bits_P = numbers_P.view(np.uint32)
    for p in range(numbers_P.shape[0]):
        number = numbers_P[p]
        if number != number:  # noqa: PLR0124  # NaN
            halves_P[p] = _NAN_BITS
            continue
        sign = (bits_P[p] >> np.uint32(16)) & np.uint32(0x8000)
        if abs(number) < _LEAST_STEP:
            exact = number * _UNITS
            units = np.floor(exact) if is_down else np.rint(exact)
            numbers_P[p] = units / _UNITS
            halves_P[p] = sign | np.uint32(abs(units))
            continue
        more = np.uint32(0xFFF) + ((bits_P[p] >> np.uint32(13)) & np.uint32(1))
        if is_down:
            more = np.uint32(0x1FFF) if sign else np.uint32(0)
        bits = (bits_P[p] + more) & np.uint32(0xFFFFE000)
        bits_P[p] = bits
        size = ((bits & np.uint32(0x7FFFFFFF)) >> np.uint32(13)) - np.uint32(_EXPONENTS)
        halves_P[p] = sign | size


@jit(fuses=False)
def _quantise_rows(
    numbers_E: Numbers, at: int, num_rows: int, length: int, num_parts: int, bits: int,
    record_R: Bytes, codes_at: int, parameters_at: int, row_L: Floats,
) -> None:  # fmt: skip
    """Quantise rows of `length` numbers, which lie one behind another from `at` on."""
    most = np.float32((1 << bits) - 1)
    size, count = length // num_parts, num_rows * num_parts
    low_P, step_P = np.empty(count, np.float32), np.empty(count, np.float32)
    for r in range(num_rows):
        widen(numbers_E[at + r * length : at + (r + 1) * length], row_L)
        for part in range(num_parts):
            first, p = part * size, part * num_rows + r
            low, high, is_finite = row_L[first], row_L[first], True
            for x in range(first, first + size):
                number = row_L[x]
                is_finite = is_finite and np.isfinite(number)
                low, high = min(low, number), max(high, number)
            low_P[p] = min(max(low, -_MOST), _MOST) if is_finite else np.float32(0)
            step_P[p] = high if is_finite else np.float32(np.nan)
    parameters = record_R[parameters_at : parameters_at + 4 * count].view(np.uint16)
    # Down: a code is not negative, so numbers below a lowest number would all be read as it.
    round_to_halves(low_P, parameters[:count], True)  # noqa: FBT003
    for p in range(count):
        step = (step_P[p] - low_P[p]) / most
        step_P[p] = min(max(step, _LEAST_STEP), _MOST) if step == step else step  # noqa: PLR0124
    round_to_halves(step_P, parameters[count:], False)  # noqa: FBT003
    for r in range(num_rows):
        widen(numbers_E[at + r * length : at + (r + 1) * length], row_L)
        for part in range(num_parts):
            first, p = part * size, part * num_rows + r
            low, inverse = low_P[p], np.float32(1) / step_P[p]
            is_finite = inverse == inverse  # noqa: PLR0124
            for x in range(first, first + size):
                code = np.rint((row_L[x] - low) * inverse) if is_finite else np.float32(0)
                row_L[x] = min(max(code, np.float32(0)), most)
        if bits == _FOUR_BITS:
            half = length // 2
            for x in range(half):
                pair = np.uint32(row_L[x]) | (np.uint32(row_L[half + x]) << np.uint32(4))
                record_R[codes_at + r * half + x] = pair
        else:
            for x in range(length):
                record_R[codes_at + r * length + x] = np.uint32(row_L[x])


@jit()
def quantise_page(numbers_E: Numbers, record_R: Bytes, sides: Sides) -> None:
    """Quantise one page of one head."""
    dim, value_dim, page_size = sides.dim, sides.value_dim, sides.page_size
    values_at = dim * page_size * sides.key_bits // 8
    keys_parameters = values_at + value_dim * page_size * sides.value_bits // 8
    num_rows, groups = key_rows(sides), sides.value_groups
    _quantise_rows(
        numbers_E, 0, dim, page_size, num_rows // dim, sides.key_bits, record_R, 0,
        keys_parameters, np.empty(page_size, np.float32),
    )  # fmt: skip
    _quantise_rows(
        numbers_E, dim * page_size, page_size * groups, value_dim // groups, 1, sides.value_bits,
        record_R, values_at, keys_parameters + 4 * num_rows,
        np.empty(value_dim // groups, np.float32),
    )  # fmt: skip


@jit(borrows=True)
def write_tail(
    key_TC: Numbers, key_at: int, value_TC: Numbers, value_at: int, offset_T: Ints,
    pages: QuantisedPages,
) -> None:  # fmt: skip
    """Write new keys and values to their own pages; they begin in these columns."""
    num_heads, dim, value_dim, page_size, _, _, _ = pages.sides
    values = dim * page_size
    for t in range(key_TC.shape[0]):
        code, offset = -1 - pages.own_T[t], offset_T[t]
        target_XKE = pages.staged_GKE if code % 2 else pages.tail_XKE
        place = code // 2
        for head in range(num_heads):
            for d in range(dim):
                number = key_TC[t, key_at + head * dim + d]
                target_XKE[place, head, d * page_size + offset] = number
            for v in range(value_dim):
                number = value_TC[t, value_at + head * value_dim + v]
                target_XKE[place, head, values + offset * value_dim + v] = number


@jit()
def quantise_filled(
    begin: int, end: int, offset_T: Ints, sequences: SequenceArrays, pages: QuantisedPages
) -> None:
    """Quantise each page whose last offset one of the tokens `begin` to `end` - 1 has written.

    All tokens of the step must be written, because a page may hold several of them.
    """
    page_size = pages.sides.page_size
    for s in range(sequences.first_position_S.shape[0]):
        first, after = sequences.cu_seqlens_S1[s], sequences.cu_seqlens_S1[s + 1]
        for t in range(max(begin, first), min(end, after)):
            if offset_T[t] != page_size - 1:
                continue
            page = (sequences.first_position_S[s] + t - first) // page_size
            page_id = sequences.page_table_SN[s, page]
            code = -1 - pages.own_T[t]
            source_XKE = pages.staged_GKE if code % 2 else pages.tail_XKE
            for head in range(pages.sides.num_heads):
                record_R = pages.records_NKR[page_id, head]
                quantise_page(source_XKE[code // 2, head], record_R, pages.sides)


@jit(apart=True)
def write_pages(
    key_TC: Numbers, key_at: int, value_TC: Numbers, value_at: int, destinations: Any,
    plain_sequences: tuple[Any, ...], plain_pages: tuple[Any, ...],
) -> None:  # fmt: skip
    """Write a step's keys and values, and quantise the pages that are full now.

    The plain tuples are a Destinations, a SequenceArrays and a QuantisedPages.
    """
    offset_T = Destinations(*destinations).offset_T
    records_NKR, tail_XKE, staged_GKE, own_T, sides = plain_pages
    pages = QuantisedPages(records_NKR, tail_XKE, staged_GKE, own_T, Sides(*sides))
    write_tail(key_TC, key_at, value_TC, value_at, offset_T, pages)
    quantise_filled(0, key_TC.shape[0], offset_T, SequenceArrays(*plain_sequences), pages)
