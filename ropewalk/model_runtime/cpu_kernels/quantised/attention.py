"""The kernels of `attention.py` over quantised and tail pages.

A query at position p reads earlier pages quantised, and its own page p // O exact. So all rows of a
tile must have one own page: a tile ends with its page.

Shapes: see `records.py`; W = work items.
"""

from typing import Any

import numpy as np
from numba import carray

from ropewalk.model_runtime.cpu_kernels.attention.attention import (
    TILE,
    Source,
    attention_kernel,
    room,
)
from ropewalk.model_runtime.cpu_kernels.attention.attention_dot import SINGLY
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    AngleArrays,
    Destinations,
    Floats,
    FusedStep,
    Ints,
    Numbers,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import widen
from ropewalk.model_runtime.cpu_kernels.fused_decode import (
    DIM,
    LAYER,
    NUM_KEY_HEADS,
    SECOND_AT,
    THIRD_AT,
    VALUE_DIM,
    Access,
)
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.quantised.quantise import write_pages
from ropewalk.model_runtime.cpu_kernels.quantised.records import (
    QuantisedPages,
    Sides,
    key_rows,
    record_bytes,
    turn_quantised,
    turn_tail,
    widen_values,
)
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, pointer_to

_LIKE_BYTES = np.empty(0, np.uint8)


@jit()
def _named(plain_pages: tuple[Any, ...]) -> QuantisedPages:
    records_NKR, tail_XKE, staged_GKE, own_T, sides = plain_pages
    return QuantisedPages(records_NKR, tail_XKE, staged_GKE, own_T, Sides(*sides))


@jit(inline=True)
def _sides(pages: QuantisedPages) -> tuple[int, int, int]:
    return pages.sides.dim, pages.sides.page_size, pages.sides.value_dim


@jit(inline=True)
def _most_tokens(pages: QuantisedPages, position: int) -> int:
    return min(TILE, pages.sides.page_size - position % pages.sides.page_size)


@jit()
def _room(pages: QuantisedPages, width_V: int) -> Any:
    sides = pages.sides
    parameters = max(key_rows(sides), sides.page_size * sides.value_groups) + WIDTH
    values_OV = room(sides.page_size + 1, width_V, np.float32)
    return values_OV[: sides.page_size], np.empty(2 * parameters, np.float32)


@jit(inline=True)
def _locate(pages: QuantisedPages, page_table_N: Ints, page: int, token: int, own: int) -> Any:
    return pages.own_T[token] if page == own else np.int64(page_table_N[page])


@jit(inline=True)
def _address(pages: QuantisedPages, page_id: int, head: int) -> Any:
    at = (page_id * pages.sides.num_heads + head) * record_bytes(pages.sides)
    return np.int64(pages.records_NKR.ctypes.data) + at


@jit()
def _rotate_keys(
    pages: QuantisedPages, place: int, next_id: int, head: int, offsets: AngleArrays, table_id: int,
    row_X: Floats, keys_DO: Numbers,
) -> None:  # fmt: skip
    sides = pages.sides
    if place >= 0:
        address = _address(pages, place, head)
        next_address = _address(pages, next_id, head) if next_id >= 0 else 0
        turn_quantised(address, next_address, sides, offsets, table_id, row_X, keys_DO)
    elif place % 2:
        turn_tail(pages.tail_XKE, (-1 - place) // 2, head, sides, offsets, table_id, keys_DO)
    else:
        turn_tail(pages.staged_GKE, (-1 - place) // 2, head, sides, offsets, table_id, keys_DO)


@jit()
def _place_values(
    pages: QuantisedPages, place: int, head: int, num_keys: int, row_X: Floats, scratch_OV: Floats
) -> Any:
    sides = pages.sides
    if place >= 0:
        widen_values(_address(pages, place, head), sides, row_X, scratch_OV)
        return scratch_OV
    source_XKE = pages.tail_XKE if place % 2 else pages.staged_GKE
    numbers_E, dim = source_XKE[(-1 - place) // 2, head], sides.value_dim
    for o in range(num_keys):
        at = (sides.dim * sides.page_size) + o * dim
        widen(numbers_E[at : at + dim], scratch_OV[o, :dim])
    return scratch_OV


QUANTISED = Source(_named, _sides, _most_tokens, _room, _locate, _rotate_keys, _place_values)
attend_quantised = attention_kernel(SINGLY, QUANTISED)


@jit()
def _pages_of(fields_F: Ints, like: Numbers, step: FusedStep) -> tuple[Any, ...]:
    """Return the pages of a layer as a one-call step has them; it stages none."""
    num_heads, dim, value_dim = fields_F[NUM_KEY_HEADS], fields_F[DIM], fields_F[VALUE_DIM]
    records_at, tail_at, key_bits, value_bits, groups = step.addresses_LX[fields_F[LAYER]]
    sides = (num_heads, dim, value_dim, step.page_size, key_bits, value_bits, groups)
    shape = (step.num_pages, num_heads, record_bytes(Sides(*sides)))
    records_NKR = carray(pointer_to(records_at, _LIKE_BYTES), shape)
    # Only the strides of tail pages are used.
    size = (dim + value_dim) * step.page_size
    tail_XKE = carray(pointer_to(tail_at, like), (step.num_pages, num_heads, size))
    return records_NKR, tail_XKE, tail_XKE, Destinations(*step.destinations).page_T, sides


@jit()
def _write(fields_F: Ints, key_RC: Numbers, value_RC: Numbers, step: FusedStep) -> None:
    key_at, value_at = fields_F[SECOND_AT], fields_F[THIRD_AT]
    pages = _pages_of(fields_F, key_RC, step)
    _, begins, firsts, table_ids = step.sequences
    table_SN = step.page_table_GSN[step.group_L[fields_F[LAYER]]]
    sequences = (table_SN, begins, firsts, table_ids)
    write_pages(key_RC, key_at, value_RC, value_at, step.destinations, sequences, pages)


ACCESS = Access(attend_quantised, _pages_of, _write)
