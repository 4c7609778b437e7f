"""Draw a token from rows whose tail top_k, top_p or min_p cuts off, without a sort.

Tokens are ranked by their logit, and equal ones by their id. Each cut keeps a prefix of the ranks,
so the smallest of the prefixes is kept, and its weight is all that a draw needs. The last logit of
a prefix is found by bisection over the numbers that float32 has: 32 sums over the row, which stays
in the L2 cache. Weights are whole numbers, whose sums do not depend on an order. So a row has the
same draw in any batch, and the host waits for nothing.

The decisions are those of `ranked_draw.draw_on_device`, except that the weights are rounded by this
device's exponential function.

Shapes: R = rows, V = vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.gpu.rotate import jit, padded
from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.transfer import on_device

_BLOCK = 8192  # tokens that a program holds at once
_WARPS = 32
_UNIT = tl.constexpr(2.0**40)  # the weight of the likeliest token, as in ranked_draw.py
_LOWEST = tl.constexpr(-(2**31) + 2**23 - 1)  # the key of minus infinity


@jit
def _loaded(row, at, size, BLOCK: tl.constexpr):
    """Return keys and weights of a block. Keys are ordered as the values, whose maximum is 0."""
    i = at + tl.arange(0, BLOCK)
    value = tl.load(row + i, mask=i < size, other=float("-inf"))
    # Minus zero is equal to zero, and NaN has no weight.
    value = tl.where(value < 0.0, value, tl.where(value == 0.0, 0.0, float("-inf")))
    bits = value.to(tl.int32, bitcast=True)
    weight = (tl.exp(value) * _UNIT).to(tl.int64)
    return i, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), weight


@jit
def _from_key_on(row, size, key, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the weights of all tokens with such a key or a larger one.

    COUNTED: return their number instead.
    """
    total = tl.zeros([BLOCK], tl.int64)
    for at in range(0, size, BLOCK):
        i, keys, weight = _loaded(row, at, size, BLOCK)
        is_in = (keys >= key) & (i < size)
        total += tl.where(is_in, 1 if COUNTED else weight, 0)
    return tl.sum(total, 0)


@jit
def _last_key(row, size, goal, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key from which on there is as much as `goal`, at most everything."""
    low = tl.full([], _LOWEST, tl.int32)
    high = tl.full([], 0, tl.int32)
    for _ in range(32):
        middle = low + (high - low + 1) // 2
        is_enough = _from_key_on(row, size, middle, COUNTED, BLOCK) >= goal
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return low


@jit
def _around(row, size, key, BLOCK: tl.constexpr):
    """Return the sum of the weights above a key, and the weight of a token that has it."""
    above = tl.zeros([BLOCK], tl.int64)
    own = tl.zeros([BLOCK], tl.int64)
    for at in range(0, size, BLOCK):
        _, keys, weight = _loaded(row, at, size, BLOCK)
        above += tl.where(keys > key, weight, 0)
        own = tl.maximum(own, tl.where(keys == key, weight, 0))
    return tl.sum(above, 0), tl.maximum(tl.max(own, 0), 1)


@jit("size")
def _draw(scaled, cuts, drawn, size, BLOCK: tl.constexpr):
    """Draw one row's token. `cuts`: top_k, top_p, min_p and the random number, float64."""
    r = tl.program_id(0).to(tl.int64)
    row = scaled + r * size
    top_k = tl.load(cuts + 4 * r).to(tl.int64)
    top_p, min_p = tl.load(cuts + 4 * r + 1), tl.load(cuts + 4 * r + 2)
    uniform = tl.load(cuts + 4 * r + 3)
    least = tl.full([], _LOWEST, tl.int32)
    if top_k > 0:  # ties with the k-th token stay
        least = _last_key(row, size, tl.minimum(top_k, size), COUNTED=True, BLOCK=BLOCK)
    kept = _from_key_on(row, size, least, COUNTED=False, BLOCK=BLOCK)
    if top_p < 1.0:
        reached = tl.maximum(tl.ceil(kept.to(tl.float64) * top_p).to(tl.int64), 1)
        key = _last_key(row, size, reached, COUNTED=False, BLOCK=BLOCK)
        above, weight = _around(row, size, key, BLOCK)
        kept = tl.minimum(kept, above + (reached - above + weight - 1) // weight * weight)
    if min_p > 0.0:
        lightest = tl.ceil(min_p * _UNIT).to(tl.int64)
        heavy = tl.zeros([BLOCK], tl.int64)
        for at in range(0, size, BLOCK):
            _, _, weights = _loaded(row, at, size, BLOCK)
            heavy += tl.where(weights >= lightest, weights, 0)
        kept = tl.minimum(kept, tl.sum(heavy, 0))
    one = tl.full([], _UNIT, tl.float64).to(tl.int64)
    kept = tl.maximum(kept, one)  # the likeliest token stays
    target = tl.minimum((uniform * kept.to(tl.float64)).to(tl.int64), kept - 1)
    key = _last_key(row, size, target + 1, COUNTED=False, BLOCK=BLOCK)
    above, weight = _around(row, size, key, BLOCK)
    nth = (target - above) // weight
    token = tl.zeros([BLOCK], tl.int32)
    before = tl.full([], 0, tl.int64)
    for at in range(0, size, BLOCK):
        i, keys, _ = _loaded(row, at, size, BLOCK)
        is_equal = ((keys == key) & (i < size)).to(tl.int64)
        is_drawn = (is_equal > 0) & (before + tl.cumsum(is_equal, 0) - 1 == nth)
        token = tl.maximum(token, tl.where(is_drawn, i, 0))
        before += tl.sum(is_equal, 0)
    tl.store(drawn + r, tl.max(token, 0).to(tl.int64))


def draw_ranked(
    scaled_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> Tensor:
    """Draw a token of each row, int64 [R]. A row with NaN gets any token of the vocabulary.

    `scaled_RV`: float32 logits after the temperature, relative to the row's max. `uniforms`: in
    [0, 1), by row.
    """
    scaled_RV = scaled_RV.contiguous()
    num_rows, size = scaled_RV.shape
    rows = zip(params, uniforms, strict=True)
    cuts = np.array([(each.top_k, each.top_p, each.min_p, drawn) for each, drawn in rows])
    drawn_R = torch.empty(num_rows, dtype=torch.int64, device=scaled_RV.device)
    _draw[(num_rows,)](
        scaled_RV, on_device(cuts, scaled_RV.device), drawn_R, size,
        BLOCK=min(_BLOCK, padded(size)), num_warps=_WARPS,
    )  # fmt: skip
    return drawn_R
