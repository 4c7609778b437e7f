"""Draw a token from each row, without a sort; top_k, top_p and min_p may cut its tail off.

A row's logits become values relative to its best one, over its temperature. Tokens are ranked by
their logit, and equal ones by their id. Each cut keeps a prefix of the ranks, so the smallest of
the prefixes is kept, and its weight is all that a draw needs. The last logit of a prefix is found
among the numbers that float32 has. For each of 16 keys, a pass sums the weights of the tokens with
at least that key, and the next pass looks between two neighbours of these keys. After 8 passes they
are neighbours in float32.

Weights are whole numbers, whose sums do not depend on an order. So many programs share a row, a
row has the same draw in any batch, and the host waits for nothing. No launch depends on a number of
a row, so a draw can be captured. Programs of a search that a row does not need return at once.

The decisions are those of `ranked_draw.draw_on_device`, except that the weights are rounded by this
device's exponential function.

Shapes: R = rows, V = vocabulary, C = numbers that a row is drawn with, N = numbers of its searches.
"""

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.gpu.cards.card import card_of
from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.primitives import padded

_BLOCK, _WARPS = 256, 8  # tokens that a program holds at once, one for each thread
_SEARCHED = 4096  # the same where it looks for the drawn token
_MOVED = 2048  # the same where it looks for the best token, and where it scales
_PROGRAMS, _LEAST_SPAN = 8, 2048  # programs for each processor; tokens of a program
# Between the keys of each pass. All keys are within 2**31.
_STEPS = (2**27, 2**23, 2**19, 2**15, 2**11, 2**7, 2**3, 1)
_LAST = tl.constexpr(len(_STEPS) - 1)
_PROBES = tl.constexpr(16)  # keys of a pass
# Numbers of a pass: where it looked first, and its sums. Those of a search are of all its passes.
_PASS = tl.constexpr(1 + _PROBES.value)
_SEARCH = tl.constexpr(len(_STEPS) * _PASS.value)
_TOP_K, _TOP_P, _DRAWN = (tl.constexpr(index) for index in range(3))  # the searches, in order
_KEPT = tl.constexpr(3 * _SEARCH.value)  # weights that top_k and min_p keep, behind them
_BEST, _BROKEN = (tl.constexpr(_KEPT.value + at) for at in (2, 3))  # token; whether not finite
_NUMBERS = _KEPT.value + 4
# Numbers that draw a row: top_k, top_p, min_p, a number in [0, 1), temperature; 0 is greedy.
CUTS = 5
_CUTS = tl.constexpr(CUTS)
_TEMPERATURE = tl.constexpr(4)
_IDS, _LAST_ID = tl.constexpr(2**22), tl.constexpr(2**22 - 1)  # more than any vocabulary has
_OFFSET = tl.constexpr(2**31)  # makes keys positive
_UNIT = tl.constexpr(2.0**40)  # the weight of the likeliest token, as in ranked_draw.py
_LOWEST = tl.constexpr(-(2**31) + 2**23 - 1)  # the key of minus infinity
_NEVER = tl.constexpr(2**62)  # more than any sum


@jit
def _key(value):
    """Return an integer that is ordered as the values are, 0 for their maximum, which is 0."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _weight(value):
    return (tl.exp(value) * _UNIT).to(tl.int64)


@jit
def _values(row, at, size, BLOCK: tl.constexpr):
    """Return a block of a row with its tokens. Minus zero becomes zero, and NaN minus infinity."""
    i = at + tl.arange(0, BLOCK)
    value = tl.load(row + i, mask=i < size, other=float("-inf"))
    return i, tl.where(value < 0.0, value, tl.where(value == 0.0, 0.0, float("-inf")))


@jit
def _found(search, goal, at, step):
    """Return the largest key of a pass from which on there is `goal`, and the sum above it."""
    place = search + at * _PASS
    sums = tl.load(place + 1 + tl.arange(0, _PROBES))
    # The last of these keys is known to have less. If the first has, too, the lowest is returned.
    num = tl.sum((sums >= goal).to(tl.int32), 0)
    return tl.load(place).to(tl.int32) + num * step, tl.load(place + 1 + num)


@jit
def _kept_by_top_p(numbers, cuts):
    """Return the weight of the nucleus: that of the fewest best tokens that reach top_p."""
    goal = _goal(numbers, cuts, _TOP_P)
    key, above = _found(numbers + _TOP_P * _SEARCH, goal, _LAST, 1)
    weight = _weight_of(key)
    return above + (goal - above + weight - 1) // weight * weight


@jit
def _value(key):
    """Return the number that has this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@jit
def _weight_of(key):
    """Return the weight of a token with this key, at least 1."""
    return tl.maximum(_weight(_value(key)), 1)


@jit
def _goal(numbers, cuts, SEARCH: tl.constexpr):
    """Return how much there has to be from the wanted key on."""
    if SEARCH == _TOP_K:
        top_k = tl.load(cuts).to(tl.int64)
        goal = tl.where(top_k > 0, top_k, _NEVER)
    else:
        kept = tl.load(numbers + _KEPT)
        top_p = tl.load(cuts + 1)
        goal = tl.maximum(tl.ceil(kept.to(tl.float64) * top_p).to(tl.int64), 1)
    return goal


@jit
def _target(numbers, cuts):
    """Return the drawn place among the kept weights; the token that covers it is drawn."""
    kept = tl.load(numbers + _KEPT)
    # Without top_p in any row, no search for it was made, and its numbers are zeros.
    nucleus = _kept_by_top_p(numbers, cuts)
    kept = tl.where(tl.load(cuts + 1) < 1.0, tl.minimum(kept, nucleus), kept)
    kept = tl.minimum(kept, tl.load(numbers + _KEPT + 1))
    one = tl.full([], _UNIT, tl.float64).to(tl.int64)
    kept = tl.maximum(kept, one)  # the likeliest token stays
    return tl.minimum((tl.load(cuts + 3) * kept.to(tl.float64)).to(tl.int64), kept - 1)


@jit
def _add_four(totals, key, weight, low, step):
    """Add the weights of tokens from each of four keys on."""
    a, b, c, d = totals
    return (
        a + tl.where(key >= low, weight, 0),
        b + tl.where(key >= low + step, weight, 0),
        c + tl.where(key >= low + 2 * step, weight, 0),
        d + tl.where(key >= low + 3 * step, weight, 0),
    )


@jit
def _send_four(place, totals):
    for k in tl.static_range(4):
        tl.atomic_add(place + k, tl.sum(totals[k], 0))


@jit("size", "span")
def _best(logits, numbers, size, span, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the first of the best tokens in a part of a row, and whether all logits are finite."""
    r = tl.program_id(0).to(tl.int64)
    best, broken = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, size), BLOCK):
        i = start + tl.arange(0, BLOCK)
        is_token = i < size
        value = tl.load(logits + r * size + i, mask=is_token, other=0.0) + 0.0  # no minus zero
        ranked = (_key(value).to(tl.int64) + _OFFSET) * _IDS + (-i + _LAST_ID)
        best = tl.maximum(best, tl.where(is_token, ranked, 0))
        broken = tl.maximum(broken, tl.where(tl.abs(value) < float("inf"), 0, 1).to(tl.int64))
    numbers += r * NUMBERS
    tl.atomic_max(numbers + _BEST, tl.max(best, 0))
    tl.atomic_max(numbers + _BROKEN, tl.max(broken, 0))


@jit("size", "span", "num_rows")
def _scale(
    logits, cuts, numbers, scaled, told, size, span, num_rows,
    NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale a part of a row. Store whether the row is finite, and the token of a greedy row."""
    r = tl.program_id(0).to(tl.int64)
    numbers, cuts = numbers + r * NUMBERS, cuts + _CUTS * r
    ranked = tl.load(numbers + _BEST)
    if tl.program_id(1) == 0:
        tl.store(told + r, 1 - tl.load(numbers + _BROKEN))
        tl.store(told + num_rows + r, -(ranked % _IDS) + _LAST_ID)
    temperature = tl.load(cuts + _TEMPERATURE).to(tl.float32)
    if temperature <= 0:
        return
    best = _value((ranked // _IDS - _OFFSET).to(tl.int32))
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, size), BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(logits + r * size + i, mask=i < size, other=0.0)
        over = tl.div_rn(value - best, tl.full([BLOCK], 1.0, tl.float32) * temperature)
        tl.store(scaled + r * size + i, over, mask=i < size)


@jit("size", "span", "at", "before", "step")
def _look(
    scaled, cuts, numbers, size, span, at, before, step,
    SEARCH: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a part of a row from each key of a pass on. Tokens are counted in the search for top_k.

    `step`: between the keys of this pass. `before`: between those of the one before.
    """
    r = tl.program_id(0).to(tl.int64)
    numbers, cuts = numbers + r * NUMBERS, cuts + _CUTS * r
    if tl.load(cuts + _TEMPERATURE) <= 0:
        return
    if SEARCH == _TOP_K:  # noqa: SIM102  # a constant decides
        if tl.load(cuts) <= 0:
            return
    if SEARCH == _TOP_P:  # noqa: SIM102
        if tl.load(cuts + 1) >= 1:
            return
    search = numbers + SEARCH * _SEARCH
    low = tl.full([], _LOWEST, tl.int32)
    if at > 0:
        goal = _target(numbers, cuts) + 1 if SEARCH == _DRAWN else _goal(numbers, cuts, SEARCH)
        low, _above = _found(search, goal, at - 1, before)
    place = search + at * _PASS
    if tl.program_id(1) == 0:
        tl.store(place, low.to(tl.int64))
    none = tl.zeros([BLOCK], tl.int64)
    one, two = (none, none, none, none), (none, none, none, none)
    three, four = one, two
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, size), BLOCK):
        i, value = _values(scaled + r * size, start, size, BLOCK)
        key, weight = _key(value), _weight(value)
        if SEARCH == _TOP_K:
            weight = (i < size).to(tl.int64)
        one = _add_four(one, key, weight, low + step, step)
        two = _add_four(two, key, weight, low + 5 * step, step)
        three = _add_four(three, key, weight, low + 9 * step, step)
        four = _add_four(four, key, weight, low + 13 * step, step)
    _send_four(place + 1, one)
    _send_four(place + 5, two)
    _send_four(place + 9, three)
    _send_four(place + 13, four)


@jit("size", "span")
def _keep(scaled, cuts, numbers, size, span, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the weights of a part of a row that top_k keeps, and those that min_p keeps."""
    r = tl.program_id(0).to(tl.int64)
    numbers, cuts = numbers + r * NUMBERS, cuts + _CUTS * r
    if tl.load(cuts + _TEMPERATURE) <= 0:
        return
    kth, _above = _found(numbers, _goal(numbers, cuts, _TOP_K), _LAST, 1)
    least = tl.where(tl.load(cuts) > 0, kth, _LOWEST)  # ties with the k-th token stay
    lightest = tl.ceil(tl.load(cuts + 2) * _UNIT).to(tl.int64)
    best, heavy = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, size), BLOCK):
        _, value = _values(scaled + r * size, start, size, BLOCK)
        weight = _weight(value)
        best += tl.where(_key(value) >= least, weight, 0)
        heavy += tl.where(weight >= lightest, weight, 0)
    tl.atomic_add(numbers + _KEPT, tl.sum(best, 0))
    tl.atomic_add(numbers + _KEPT + 1, tl.sum(heavy, 0))


@jit("size", "num_rows")
def _find(scaled, cuts, numbers, told, size, num_rows, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """Find the token of one row: of those with the drawn key, the one at the drawn place."""
    r = tl.program_id(0).to(tl.int64)
    row = scaled + r * size
    numbers, cuts = numbers + r * NUMBERS, cuts + _CUTS * r
    if tl.load(cuts + _TEMPERATURE) <= 0:
        return
    target = _target(numbers, cuts)
    key, above = _found(numbers + _DRAWN * _SEARCH, target + 1, _LAST, 1)
    nth = (target - above) // _weight_of(key)
    token = tl.zeros([BLOCK], tl.int32)
    before = tl.full([], 0, tl.int64)
    for at in range(0, size, BLOCK):
        i, value = _values(row, at, size, BLOCK)
        is_equal = ((_key(value) == key) & (i < size)).to(tl.int64)
        is_drawn = (is_equal > 0) & (before + tl.cumsum(is_equal, 0) - 1 == nth)
        token = tl.maximum(token, tl.where(is_drawn, i, 0))
        before += tl.sum(is_equal, 0)
    tl.store(told + num_rows + r, tl.max(token, 0).to(tl.int64))


def draw_rows(
    logits_RV: Tensor, cuts_RC: Tensor, scaled_RV: Tensor, searches: tuple[bool, bool, bool]
) -> Tensor:
    """Return whether each row is finite, then a token of each row: int64 [2 R].

    A row that is not finite gets any token of the vocabulary. `logits_RV`: float32, contiguous.
    `cuts_RC`: float64, as CUTS says. `scaled_RV`: float32 in the shape of the logits, is written;
    it may be the logits. `searches`: whether any row has top_k, has top_p, and is drawn.
    """
    device, (num_rows, size) = logits_RV.device, logits_RV.shape
    numbers_RN = torch.zeros(num_rows, _NUMBERS, dtype=torch.int64, device=device)
    told_A = torch.empty(2 * num_rows, dtype=torch.int64, device=device)
    num_programs = card_of(device).num_processors * _PROGRAMS
    span = max(_LEAST_SPAN, -(-num_rows * size // num_programs // _BLOCK) * _BLOCK)
    sizes = {"NUMBERS": _NUMBERS, "num_warps": _WARPS}
    parts = num_rows, -(-size // span)
    moved = {**sizes, "BLOCK": min(_MOVED, padded(size))}
    _best[parts](logits_RV, numbers_RN, size, span, **moved)
    given = cuts_RC, numbers_RN
    _scale[parts](logits_RV, *given, scaled_RV, told_A, size, span, num_rows, **moved)
    has_top_k, has_top_p, is_drawn = searches
    if not is_drawn:
        return told_A

    def look_for(search: tl.constexpr) -> None:
        before = 0
        for at, step in enumerate(_STEPS):
            _look[parts](
                scaled_RV, *given, size, span, at, before, step, SEARCH=search.value, BLOCK=_BLOCK,
                **sizes,
            )  # fmt: skip
            before = step

    if has_top_k:
        look_for(_TOP_K)
    _keep[parts](scaled_RV, *given, size, span, BLOCK=_BLOCK, **sizes)
    if has_top_p:
        look_for(_TOP_P)
    look_for(_DRAWN)
    searched = min(_SEARCHED, padded(size))
    _find[(num_rows,)](scaled_RV, *given, told_A, size, num_rows, BLOCK=searched, **sizes)
    return told_A
