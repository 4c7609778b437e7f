"""How the compiled kernel multiplies: float32 values one by one, or bfloat16 values in pairs.

Scores are products of rotated keys and queries. Accumulators are products of probabilities and
values. Everything else is float32.

If the cache is bfloat16 and the processor multiplies pairs fast (`bf16_dot.py`), one product takes
two dimensions of a key, or values at two offsets. For that, keys and queries are rounded
to bfloat16 when they are rotated, and probabilities when the softmax is computed. Otherwise all
three stay float32, and values are widened as they are loaded.

In scratch arrays a pair is two elements side by side. A pair of keys or queries holds the two
dimensions that rotate together, p and p + P, or two neighbouring dimensions that do not rotate. A
pair of values or probabilities holds the offsets o and o + 1, with o even.

Shapes: K = key heads, D = key dimensions, V = value dimensions, S = rotation tables, N = pages,
O = offsets in a page, P = rotated pairs, R = rows of a tile, B = rows of a block. In scratch arrays
O and V are rounded up to whole SIMD registers.
"""

from typing import Any, NamedTuple

import numpy as np

from ropewalk.model_runtime.cpu_kernels.attention.bf16_dot import (
    FIRST,
    SECOND,
    add_half_products,
    add_pair_products,
    copy_as_pairs,
    store_pairs,
)
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import (
    AngleArrays,
    Floats,
    Numbers,
    PageArrays,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import as_cached, widen
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.register_sums import add_products
from ropewalk.model_runtime.cpu_kernels.simd import (
    WIDTH,
    fma,
    load,
    multiply,
    prefetch,
    store,
    subtract,
)
from ropewalk.model_runtime.cpu_kernels.trials import pairs_pay

_LINE = 16  # float32 values in a cache line


def query_rotator(put_rotated: Any, places_of: Any) -> Any:
    """Compiled: the rotation of a query back by a page's start.

    The page's keys then need in-page angles only. `put_rotated` stores the two outputs of a
    rotation in registers, and `places_of` returns the places of a single one.
    """

    @jit(inline=True, borrows=True)
    def rotate_query(
        rotated_RD: Floats, row: int, starts: AngleArrays, table_id: int, page: int,
        query_BD: Numbers, place: int,
    ) -> None:  # fmt: skip
        cos_SNP, sin_SNP = starts.cos, starts.sin
        pairs, dim = cos_SNP.shape[2], rotated_RD.shape[1]
        table = (table_id * cos_SNP.shape[1] + page) * pairs
        source, target = row * dim, place * dim
        in_lanes = pairs - pairs % WIDTH
        for p in range(0, in_lanes, WIDTH):
            first, second = load(rotated_RD, source + p), load(rotated_RD, source + pairs + p)
            cos, sin = load(cos_SNP, table + p), load(sin_SNP, table + p)
            put_rotated(
                query_BD, target, p, pairs,
                fma(first, cos, multiply(second, sin)),
                subtract(multiply(second, cos), multiply(first, sin)),
            )  # fmt: skip
        for p in range(in_lanes, pairs):
            one, other = rotated_RD[row, p], rotated_RD[row, p + pairs]
            angle_cos, angle_sin = cos_SNP[table_id, page, p], sin_SNP[table_id, page, p]
            at_one, at_other = places_of(p, pairs)
            query_BD[place, at_one] = as_cached(one * angle_cos + other * angle_sin, query_BD)
            query_BD[place, at_other] = as_cached(other * angle_cos - one * angle_sin, query_BD)
        for d in range(2 * pairs, dim):
            query_BD[place, d] = as_cached(rotated_RD[row, d], query_BD)

    return rotate_query


def keys_rotator(put_rotated: Any, put_rest: Any, step: int) -> Any:
    """Compiled: the rotation of keys, for page sizes that are a multiple of WIDTH.

    `put_rotated` stores the two outputs of a rotation. `put_rest` stores the dimensions that do not
    rotate, `step` of them at once.
    """

    @jit(borrows=True)
    def rotate_keys(
        pages: PageArrays, page_id: int, next_id: int, head: int, offsets: AngleArrays,
        table_id: int, row_O: Floats, keys_DO: Numbers,  # noqa: ARG001
    ) -> None:  # fmt: skip
        """Rotate a page's keys by their offsets, and prefetch the page that is read next.

        `next_id` is -1 if no page follows. Pages lie anywhere in memory, so the processor cannot
        predict which page follows.
        """
        keys_NKDO, values_NKOV = pages.keys_NKDO, pages.values_NKOV
        cos_SPO, sin_SPO = offsets.cos, offsets.sin
        _, num_heads, dim, page_size = keys_NKDO.shape
        pairs = cos_SPO.shape[1]
        base = (page_id * num_heads + head) * dim * page_size
        table = table_id * pairs * page_size
        half = pairs * page_size
        next_keys = (next_id * num_heads + head) * dim * page_size
        next_values = (next_id * num_heads + head) * page_size * values_NKOV.shape[3]
        for at in range(0, half, WIDTH):
            first, second = load(keys_NKDO, base + at), load(keys_NKDO, base + half + at)
            cos, sin = load(cos_SPO, table + at), load(sin_SPO, table + at)
            put_rotated(
                keys_DO, 0, at, half,
                subtract(multiply(first, cos), multiply(second, sin)),
                fma(second, cos, multiply(first, sin)),
            )  # fmt: skip
            if next_id >= 0 and at % _LINE == 0:
                prefetch(keys_NKDO, next_keys + at)
                prefetch(keys_NKDO, next_keys + half + at)
                prefetch(values_NKOV, next_values + 2 * at)
                prefetch(values_NKOV, next_values + 2 * at + _LINE)
        for row in range(2 * half, dim * page_size, step * page_size):
            for o in range(0, page_size, WIDTH):
                put_rest(keys_DO, row, o, keys_NKDO, base, page_size)

    return rotate_keys


@jit()
def rotate_keys_singly(
    keys_NKDO: Numbers, page_id: int, head: int, offsets: AngleArrays, table_id: int,
    row_O: Floats, keys_DO: Numbers,
) -> None:  # fmt: skip
    """Rotate a page's keys by their offsets, element by element."""
    cos_SPO, sin_SPO = offsets.cos, offsets.sin
    _, _, dim, page_size = keys_NKDO.shape
    pairs = cos_SPO.shape[1]
    for d in range(dim):
        widen(keys_NKDO[page_id, head, d], keys_DO[d, :page_size])
    for p in range(pairs):
        widen(keys_DO[p, :page_size], row_O)
        for o in range(page_size):
            first, second = row_O[o], keys_DO[p + pairs, o]
            cos, sin = cos_SPO[table_id, p, o], sin_SPO[table_id, p, o]
            keys_DO[p, o] = first * cos - second * sin
            keys_DO[p + pairs, o] = second * cos + first * sin


class Products(NamedTuple):
    """One way to multiply; its functions are compiled."""

    step: int  # dimensions of a key, or offsets of values, that one product takes
    dtype: Any  # of keys, queries and probabilities as they are multiplied
    add: Any  # add_products or add_pair_products of bf16_dot
    rotate_keys: Any  # rotates a page's keys into keys_DO
    rotate_query: Any  # rotates a row's query back into query_BD
    place_values: Any  # returns a page's first values, each row padded to whole SIMD registers
    row_weigher: Any  # makes a `weigh` for any offsets of a row from one for whole steps


def uses_pairs(keys_NKDO: Numbers) -> bool:
    """Return whether this cache can be multiplied in pairs, and this processor gains by it."""
    dim, page_size = keys_NKDO.shape[2:]
    can_be = keys_NKDO.dtype == np.uint16 and dim % 2 == 0 and page_size % WIDTH == 0
    return can_be and pairs_pay()


@jit(inline=True, borrows=True)
def _put_apart(numbers: Numbers, base: int, at: int, half: int, first: Any, second: Any) -> None:
    store(numbers, base + at, first)
    store(numbers, base + half + at, second)


@jit(inline=True)
def _places_apart(p: int, pairs: int) -> tuple[int, int]:
    return p, p + pairs


@jit(inline=True, borrows=True)
def _put_one(
    keys_DO: Numbers, row: int, o: int, keys_NKDO: Numbers, base: int, page_size: int  # noqa: ARG001
) -> None:  # fmt: skip
    store(keys_DO, row + o, load(keys_NKDO, base + row + o))


_rotate_in_registers = keys_rotator(_put_apart, _put_one, 1)


@jit()
def _rotate_keys(
    pages: PageArrays, page_id: int, next_id: int, head: int, offsets: AngleArrays, table_id: int,
    row_O: Floats, keys_DO: Numbers,
) -> None:  # fmt: skip
    """Rotate a page's keys; element by element if the page size is no multiple of WIDTH."""
    if pages.keys_NKDO.shape[3] % WIDTH == 0:
        _rotate_in_registers(pages, page_id, next_id, head, offsets, table_id, row_O, keys_DO)
    else:
        rotate_keys_singly(pages.keys_NKDO, page_id, head, offsets, table_id, row_O, keys_DO)


@jit()
def _values_in_lanes(
    values_NKOV: Numbers, page_id: int, head: int, num_keys: int, scratch_OV: Numbers
) -> Any:
    """Return a page's values in place, or padded in `scratch_OV`."""
    dim = values_NKOV.shape[3]
    if dim == scratch_OV.shape[1]:
        return values_NKOV[page_id, head]
    for o in range(num_keys):
        for v in range(dim):
            scratch_OV[o, v] = values_NKOV[page_id, head, o, v]
    return scratch_OV


SINGLY = Products(
    step=1,
    dtype=np.float32,
    add=add_products,
    rotate_keys=_rotate_keys,
    rotate_query=query_rotator(_put_apart, _places_apart),
    place_values=_values_in_lanes,
    row_weigher=lambda weigh: weigh,
)


@jit(inline=True, borrows=True)
def _put_together(
    numbers: Numbers, base: int, at: int, half: int, first: Any, second: Any  # noqa: ARG001
) -> None:  # fmt: skip
    store_pairs(numbers, base + 2 * at, first, second)


@jit(inline=True)
def _places_together(p: int, pairs: int) -> tuple[int, int]:  # noqa: ARG001
    return 2 * p, 2 * p + 1


@jit(inline=True, borrows=True)
def _put_two(
    keys_DO: Numbers, row: int, o: int, keys_NKDO: Numbers, base: int, page_size: int
) -> None:
    here = base + row + o
    copy_as_pairs(keys_DO, row + 2 * o, keys_NKDO, here, here + page_size)


@jit()
def _values_in_pairs(
    values_NKOV: Numbers, page_id: int, head: int, num_keys: int, scratch_OV: Numbers
) -> Any:
    """Copy a page's values into pairs.

    The last value may be paired with an offset that no token has written. `_weigher_of_halves`
    masks it.
    """
    _, num_heads, page_size, dim = values_NKOV.shape
    width = scratch_OV.shape[1]
    in_lanes = dim - dim % WIDTH
    numbers = scratch_OV.reshape(-1)
    for o in range(0, num_keys, 2):
        row = ((page_id * num_heads + head) * page_size + o) * dim
        for v in range(0, in_lanes, WIDTH):
            copy_as_pairs(scratch_OV, o * width + 2 * v, values_NKOV, row + v, row + dim + v)
        for v in range(in_lanes, dim):
            numbers[o * width + 2 * v] = values_NKOV[page_id, head, o, v]
            numbers[o * width + 2 * v + 1] = values_NKOV[page_id, head, o + 1, v]
    return scratch_OV


@jit(borrows=True)
def _weigh_half(
    probs_BO: Numbers, place: int, values_OV: Numbers, o: int, keep: int, row: int, acc_RV: Floats
) -> None:
    """Add one offset's probability times its values; `keep` is the half of the pair at `o`."""
    width = values_OV.shape[1]
    for v in range(0, width, WIDTH):
        before = load(acc_RV, row * width + v)
        at = place * probs_BO.shape[1] + o
        after = add_half_products(before, probs_BO, at, values_OV, o * width + 2 * v, keep)
        store(acc_RV, row * width + v, after)


def _weigher_of_halves(weigh: Any) -> Any:
    """Return a `weigh` for ranges that begin or end inside a pair; the other half may be NaN."""

    @jit(borrows=True)
    def weigh_row(
        probs_BO: Numbers, place: int, values_OV: Numbers, begin: int, end: int, row: int,
        acc_RV: Floats,
    ) -> None:  # fmt: skip
        whole_begin, whole_end = begin + begin % 2, end - end % 2
        if begin < min(whole_begin, end):
            _weigh_half(probs_BO, place, values_OV, begin - 1, SECOND, row, acc_RV)
        weigh(probs_BO, place, values_OV, whole_begin, whole_end, row, acc_RV)
        if whole_begin <= whole_end < end:
            _weigh_half(probs_BO, place, values_OV, whole_end, FIRST, row, acc_RV)

    return weigh_row


IN_PAIRS = Products(
    step=2,
    dtype=np.uint16,
    add=add_pair_products,
    rotate_keys=keys_rotator(_put_together, _put_two, 2),
    rotate_query=query_rotator(_put_together, _places_together),
    place_values=_values_in_pairs,
    row_weigher=_weigher_of_halves,
)
