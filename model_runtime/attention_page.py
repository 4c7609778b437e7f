"""The compiled kernel's inner loops: one page of keys and values, and the rows that see it.

They work on sixteen numbers at once (`lanes.py`): scores and keys on sixteen offsets of a page,
which is why a page's keys are stored by dimension; sums on sixteen dimensions of the values. A row
is computed alone or in a block of four by the same operations in the same order, so its bits are
the same either way.

numba keeps what it compiled beside the file of the outermost function, and looks at that file only:
after a change here, in `lanes.py` or in `bfloat16.py`, touch `attention_kernel.py` (and for the
last `row_norm.py`).

Shapes: K = key heads, D = key dimensions, V = value dimensions, S = table slots, N = pages,
O = offsets in a page, P = rotated pairs, R = rows of a tile, B = rows of a block, L = lanes. In
scratch arrays O and V are rounded up to whole lanes.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

from model_runtime.bfloat16 import widen
from model_runtime.lanes import (
    WIDTH,
    add,
    exp,
    fma,
    largest,
    load,
    multiply,
    spread,
    store,
    subtract,
)

BLOCK = 4  # rows whose sums stand in registers together

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function) -> Function:
    """Compile; products and sums may fuse, but sums keep their order and NaN stays NaN."""
    compiled: Function = numba.njit(
        nogil=True, cache=True, fastmath={"contract"}, error_model="numpy"
    )(function)
    return compiled


@jit
def turn_back(
    turned_RD: Any, row: int, cos_SNP: Any, sin_SNP: Any, slot: int, page: int,
    back_BD: Any, place: int,
) -> None:  # fmt: skip
    """Turn a query back by a page's start, so that in-page angles of the keys suffice."""
    pairs, dim = cos_SNP.shape[2], turned_RD.shape[1]
    table = (slot * cos_SNP.shape[1] + page) * pairs
    source, target = row * dim, place * dim
    in_lanes = pairs - pairs % WIDTH
    for p in range(0, in_lanes, WIDTH):
        first, second = load(turned_RD, source + p), load(turned_RD, source + pairs + p)
        cos, sin = load(cos_SNP, table + p), load(sin_SNP, table + p)
        store(back_BD, target + p, fma(first, cos, multiply(second, sin)))
        store(
            back_BD, target + pairs + p,
            subtract(multiply(second, cos), multiply(first, sin)),
        )  # fmt: skip
    for p in range(in_lanes, pairs):
        first, second = turned_RD[row, p], turned_RD[row, p + pairs]
        back_BD[place, p] = first * cos_SNP[slot, page, p] + second * sin_SNP[slot, page, p]
        back_BD[place, p + pairs] = second * cos_SNP[slot, page, p] - first * sin_SNP[slot, page, p]
    for d in range(2 * pairs, dim):
        back_BD[place, d] = turned_RD[row, d]


@jit
def turn_keys(
    keys_NKDO: Any, page_id: int, head: int, cos_SPO: Any, sin_SPO: Any, slot: int,
    row_O: Any, keys_DO: Any,
) -> None:  # fmt: skip
    """Turn a page's keys by their offsets."""
    _, num_heads, dim, page_size = keys_NKDO.shape
    pairs = cos_SPO.shape[1]
    if page_size % WIDTH == 0:
        base = (page_id * num_heads + head) * dim * page_size
        table = slot * pairs * page_size
        half = pairs * page_size
        for at in range(0, half, WIDTH):
            first, second = load(keys_NKDO, base + at), load(keys_NKDO, base + half + at)
            cos, sin = load(cos_SPO, table + at), load(sin_SPO, table + at)
            store(keys_DO, at, subtract(multiply(first, cos), multiply(second, sin)))
            store(keys_DO, half + at, fma(second, cos, multiply(first, sin)))
        for at in range(2 * half, dim * page_size, WIDTH):
            store(keys_DO, at, load(keys_NKDO, base + at))
        return
    for d in range(dim):
        widen(keys_NKDO[page_id, head, d], keys_DO[d, :page_size])
    for p in range(pairs):
        row_O[:] = keys_DO[p]
        for o in range(page_size):
            first, second = row_O[o], keys_DO[p + pairs, o]
            cos, sin = cos_SPO[slot, p, o], sin_SPO[slot, p, o]
            keys_DO[p, o] = first * cos - second * sin
            keys_DO[p + pairs, o] = second * cos + first * sin


@jit
def score_block(back_BD: Any, keys_DO: Any, scores_BO: Any) -> None:
    """Scores of four rows. Even and odd dimensions are summed apart: two chains are faster."""
    dim, width = keys_DO.shape
    none = spread(np.float32(0.0))
    for at in range(0, width, WIDTH):
        even0 = even1 = even2 = even3 = odd0 = odd1 = odd2 = odd3 = none
        for d in range(0, dim - 1, 2):
            here, after = load(keys_DO, d * width + at), load(keys_DO, (d + 1) * width + at)
            even0 = fma(spread(back_BD[0, d]), here, even0)
            even1 = fma(spread(back_BD[1, d]), here, even1)
            even2 = fma(spread(back_BD[2, d]), here, even2)
            even3 = fma(spread(back_BD[3, d]), here, even3)
            odd0 = fma(spread(back_BD[0, d + 1]), after, odd0)
            odd1 = fma(spread(back_BD[1, d + 1]), after, odd1)
            odd2 = fma(spread(back_BD[2, d + 1]), after, odd2)
            odd3 = fma(spread(back_BD[3, d + 1]), after, odd3)
        if dim % 2:
            here = load(keys_DO, (dim - 1) * width + at)
            even0 = fma(spread(back_BD[0, dim - 1]), here, even0)
            even1 = fma(spread(back_BD[1, dim - 1]), here, even1)
            even2 = fma(spread(back_BD[2, dim - 1]), here, even2)
            even3 = fma(spread(back_BD[3, dim - 1]), here, even3)
        store(scores_BO, at, add(even0, odd0))
        store(scores_BO, width + at, add(even1, odd1))
        store(scores_BO, 2 * width + at, add(even2, odd2))
        store(scores_BO, 3 * width + at, add(even3, odd3))


@jit
def score_row(back_BD: Any, keys_DO: Any, scores_BO: Any) -> None:
    """Scores of the block's first row: the same sums as in `score_block`."""
    dim, width = keys_DO.shape
    none = spread(np.float32(0.0))
    for at in range(0, width, WIDTH):
        even = odd = none
        for d in range(0, dim - 1, 2):
            even = fma(spread(back_BD[0, d]), load(keys_DO, d * width + at), even)
            odd = fma(spread(back_BD[0, d + 1]), load(keys_DO, (d + 1) * width + at), odd)
        if dim % 2:
            even = fma(spread(back_BD[0, dim - 1]), load(keys_DO, (dim - 1) * width + at), even)
        store(scores_BO, at, add(even, odd))


@jit
def soften(
    scores_BO: Any, place: int, begin: int, end: int, softcap: Any,
    row: int, top_R: Any, weight_RL: Any, sum_RV: Any,
) -> None:  # fmt: skip
    """Scores of one page -> shares, and the row's running softmax brought to their level."""
    width = scores_BO.shape[1]
    if softcap > 0:
        for o in range(begin, end):
            scores_BO[place, o] = softcap * np.tanh(scores_BO[place, o] / softcap)
    for o in range(begin):
        scores_BO[place, o] = -np.inf
    for o in range(end, width):
        scores_BO[place, o] = -np.inf
    top = top_R[row]
    for at in range(0, width, WIDTH):
        top = max(top, largest(load(scores_BO, place * width + at)))
    if top > top_R[row]:
        keep = spread(np.exp(top_R[row] - top))
        store(weight_RL, row * WIDTH, multiply(load(weight_RL, row * WIDTH), keep))
        for at in range(row * sum_RV.shape[1], (row + 1) * sum_RV.shape[1], WIDTH):
            store(sum_RV, at, multiply(load(sum_RV, at), keep))
        top_R[row] = top
    weight = load(weight_RL, row * WIDTH)
    for at in range(place * width, (place + 1) * width, WIDTH):
        share = exp(subtract(load(scores_BO, at), spread(top)))
        weight = add(weight, share)
        store(scores_BO, at, share)
    store(weight_RL, row * WIDTH, weight)


@jit
def weigh_block(shares_BO: Any, values_OV: Any, num_keys: int, row: int, sum_RV: Any) -> None:
    """Add a page's values to the sums of four rows, by their shares."""
    width = values_OV.shape[1]
    for at in range(0, width, WIDTH):
        sum0, sum1 = load(sum_RV, row * width + at), load(sum_RV, (row + 1) * width + at)
        sum2, sum3 = load(sum_RV, (row + 2) * width + at), load(sum_RV, (row + 3) * width + at)
        for o in range(num_keys):
            value = load(values_OV, o * width + at)
            sum0 = fma(spread(shares_BO[0, o]), value, sum0)
            sum1 = fma(spread(shares_BO[1, o]), value, sum1)
            sum2 = fma(spread(shares_BO[2, o]), value, sum2)
            sum3 = fma(spread(shares_BO[3, o]), value, sum3)
        store(sum_RV, row * width + at, sum0)
        store(sum_RV, (row + 1) * width + at, sum1)
        store(sum_RV, (row + 2) * width + at, sum2)
        store(sum_RV, (row + 3) * width + at, sum3)


@jit
def weigh_row(shares_BO: Any, values_OV: Any, begin: int, end: int, row: int, sum_RV: Any) -> None:
    """The same for the block's first row, over the keys that it sees."""
    width = values_OV.shape[1]
    for at in range(0, width, WIDTH):
        summed = load(sum_RV, row * width + at)
        for o in range(begin, end):
            summed = fma(spread(shares_BO[0, o]), load(values_OV, o * width + at), summed)
        store(sum_RV, row * width + at, summed)
