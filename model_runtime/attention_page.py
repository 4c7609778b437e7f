"""The compiled kernel, one page: keys and queries turned, scores softened.

Scores and keys are taken a register of a page's offsets at once (`lanes.py`), which is why a page's
keys are stored by dimension; sums a register of the values' dimensions at once.

Shapes: K = key heads, D = key dimensions, V = value dimensions, S = table slots, N = pages,
O = offsets in a page, P = rotated pairs, R = rows of a tile, B = rows of a block, L = lanes. In
scratch arrays O and V are rounded up to whole lanes.
"""

from typing import Any

import numpy as np

from model_runtime.bfloat16 import widen
from model_runtime.compiled import jit
from model_runtime.lanes import (
    WIDTH,
    add,
    any_above,
    ask_for,
    exp,
    fma,
    larger,
    largest,
    load,
    multiply,
    spread,
    store,
    subtract,
)

_LINE = 16  # float32 numbers of a cache line


@jit(inline=True, borrows=True)
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


def keys_turner(put_turned: Any, put_rest: Any, step: int) -> Any:
    """Compiled: turns the keys of pages that are whole lanes.

    `put_turned` puts the two outputs of a rotation, `put_rest` what does not rotate, `step`
    dimensions at once.
    """

    @jit(borrows=True)
    def turn_keys(
        keys_NKDO: Any, values_NKOV: Any, page_id: int, next_id: int, head: int,
        cos_SPO: Any, sin_SPO: Any, slot: int, row_O: Any, keys_DO: Any,  # noqa: ARG001
    ) -> None:  # fmt: skip
        """Turn a page's keys by their offsets, and ask for the page that is read next, -1: none.

        Pages lie anywhere in memory, so the processor cannot guess which one follows.
        """
        _, num_heads, dim, page_size = keys_NKDO.shape
        pairs = cos_SPO.shape[1]
        base = (page_id * num_heads + head) * dim * page_size
        table = slot * pairs * page_size
        half = pairs * page_size
        next_keys = (next_id * num_heads + head) * dim * page_size
        next_values = (next_id * num_heads + head) * page_size * values_NKOV.shape[3]
        for at in range(0, half, WIDTH):
            first, second = load(keys_NKDO, base + at), load(keys_NKDO, base + half + at)
            cos, sin = load(cos_SPO, table + at), load(sin_SPO, table + at)
            put_turned(
                keys_DO, at, half,
                subtract(multiply(first, cos), multiply(second, sin)),
                fma(second, cos, multiply(first, sin)),
            )  # fmt: skip
            if next_id >= 0 and at % _LINE == 0:
                ask_for(keys_NKDO, next_keys + at)
                ask_for(keys_NKDO, next_keys + half + at)
                ask_for(values_NKOV, next_values + 2 * at)
                ask_for(values_NKOV, next_values + 2 * at + _LINE)
        for row in range(2 * half, dim * page_size, step * page_size):
            for o in range(0, page_size, WIDTH):
                put_rest(keys_DO, row, o, keys_NKDO, base, page_size)

    return turn_keys


@jit()
def turn_keys_singly(
    keys_NKDO: Any, page_id: int, head: int,
    cos_SPO: Any, sin_SPO: Any, slot: int, row_O: Any, keys_DO: Any,
) -> None:  # fmt: skip
    """Turn a page's keys by their offsets, number by number."""
    _, _, dim, page_size = keys_NKDO.shape
    pairs = cos_SPO.shape[1]
    for d in range(dim):
        widen(keys_NKDO[page_id, head, d], keys_DO[d, :page_size])
    for p in range(pairs):
        row_O[:] = keys_DO[p]
        for o in range(page_size):
            first, second = row_O[o], keys_DO[p + pairs, o]
            cos, sin = cos_SPO[slot, p, o], sin_SPO[slot, p, o]
            keys_DO[p, o] = first * cos - second * sin
            keys_DO[p + pairs, o] = second * cos + first * sin


@jit(inline=True, borrows=True)
def soften(
    scores_BO: Any, place: int, begin: int, end: int, softcap: Any, shares_BO: Any,
    row: int, top_R: Any, weight_RL: Any, sum_RV: Any,
) -> None:  # fmt: skip
    """Scores of one page -> shares, and the row's running softmax brought to their level."""
    width = scores_BO.shape[1]
    first, behind = place * width, (place + 1) * width
    if softcap > 0:
        for o in range(begin, end):
            scores_BO[place, o] = softcap * np.tanh(scores_BO[place, o] / softcap)
    for o in range(begin):
        scores_BO[place, o] = -np.inf
    for o in range(end, width):
        scores_BO[place, o] = -np.inf
    peak = load(scores_BO, first)
    for at in range(first + WIDTH, behind, WIDTH):
        peak = larger(peak, load(scores_BO, at))
    top = top_R[row]
    if any_above(peak, spread(top)):  # seldom, so that what follows need not wait for the maximum
        top = largest(peak)
        keep = spread(np.exp(top_R[row] - top))
        store(weight_RL, row * WIDTH, multiply(load(weight_RL, row * WIDTH), keep))
        for at in range(row * sum_RV.shape[1], (row + 1) * sum_RV.shape[1], WIDTH):
            store(sum_RV, at, multiply(load(sum_RV, at), keep))
        top_R[row] = top
    weight = load(weight_RL, row * WIDTH)
    for at in range(first, behind, WIDTH):
        share = exp(subtract(load(scores_BO, at), spread(top)))
        weight = add(weight, share)
        store(shares_BO, at, share)
    store(weight_RL, row * WIDTH, weight)
