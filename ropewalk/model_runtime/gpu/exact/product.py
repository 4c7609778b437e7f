"""Products of rows with a weight on a GPU, whose rows have the same bits in any batch.

A library chooses the order of a product's sums by the number of rows. Here it follows from the
weight's shape alone. The inputs are cut into parts, a part is summed from its first input to its
last one, and then the parts are added in order. Few rows have a program for each part, so that all
processors read the weight. Many rows have one program for all parts, and no partial sums in memory.

Weights in few bits are widened to scratch, some outputs or experts at a time, and then multiplied.
Their rows have the bits of the dequantised weights.

The number of rows decides how many of them a program holds, its form. Forms with 64 rows and more
have the same instructions, and that with 16 may have others. A trial at load (`find_fault`) decides
whether a row has the same bits in all of them on the card that is there. If not, then the form with
16 rows is left out (`leave_out_least`).

Shapes: R = rows, K = inputs, N = outputs, P = parts, T = tiles of rows, E = experts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.formats.codes import Codes
from ropewalk.model_runtime.gpu.launch import is_interpreted, jit
from ropewalk.model_runtime.gpu.primitives import product

_COLUMNS = 64  # outputs of a program with few rows, by which the parts are counted
_STEP_BYTES = 128  # inputs of a row that are multiplied at once
_LEAST_INPUTS = 256  # of a part
_PROGRAMS = 256  # that read a weight; about two for each processor of a large card
_AT_ONCE = 1 << 24  # numbers that are widened to scratch at a time
_SUMMED = 1024  # numbers of a program that adds parts
_SUM_WARPS = 4
_GROUP = tl.constexpr(8)  # tiles of rows whose programs read the same outputs' weights in turn


class _Form(NamedTuple):
    """Rows and outputs of a program, and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


_forms = [_Form(16, _COLUMNS, 4, 5), _Form(64, _COLUMNS, 4, 4), _Form(128, 128, 8, 3)]
_MOST_APART = 512  # rows whose parts are summed in programs of their own
# One, and around each number where another form or another way begins.
_TRIED = (1, 16, 17, 64, 65, _MOST_APART, _MOST_APART + 1)

Weight = Tensor | Codes  # [..., N, K]


@jit("tiles", "num_rows", "num_row_tiles", "first_expert", "num_experts")
def _multiply(
    x, weight, bias, out, tiles, num_rows, num_row_tiles, first_expert, num_experts,
    x_r, out_r, weight_e, weight_n, weight_k,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    APART: tl.constexpr, BIASED: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Some rows and some outputs. APART: one part, whose sum is stored in float32.

    GROUPED: tiles of rows have an expert each, its first row, and the row after its last one. The
    weight is that of some experts.
    """
    # Programs that run at the same time share rows and weights in the L2 cache.
    place = tl.program_id(0)
    column_tiles: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    group = place // (_GROUP * column_tiles)
    in_group = tl.minimum(num_row_tiles - group * _GROUP, _GROUP)
    within = place - group * (_GROUP * column_tiles)
    row_tile, column_tile = group * _GROUP + within % in_group, within // in_group
    first_row, end_row = row_tile * ROWS, num_rows
    if GROUPED:
        expert = tl.load(tiles + 3 * row_tile) - first_expert
        first_row = tl.load(tiles + 3 * row_tile + 1).to(tl.int32)
        end_row = tl.load(tiles + 3 * row_tile + 2).to(tl.int32)
        if (first_row >= end_row) | (expert < 0) | (expert >= num_experts):
            return
        weight += expert * weight_e
        bias += expert * OUTPUTS
    r, n = first_row + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, STEP)
    # Rows and outputs behind the last one are computed, and not stored.
    row = x + tl.minimum(r, end_row - 1).to(tl.int64)[:, None] * x_r + k[None, :]
    column = weight + tl.minimum(n, OUTPUTS - 1).to(tl.int64)[:, None] * weight_n
    column += k[None, :] * weight_k
    steps: tl.constexpr = (INPUTS + STEP - 1) // STEP
    of_part: tl.constexpr = (steps + PARTS - 1) // PARTS
    whole: tl.constexpr = INPUTS % STEP == 0
    own = tl.program_id(1) if APART else 0
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(own, own + 1 if APART else PARTS):
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(part * of_part, tl.minimum((part + 1) * of_part, steps)):
            if whole:
                a, b = tl.load(row + step * STEP), tl.load(column + step * STEP * weight_k)
            else:
                is_input = (k + step * STEP < INPUTS)[None, :]
                a = tl.load(row + step * STEP, mask=is_input, other=0.0)
                b = tl.load(column + step * STEP * weight_k, mask=is_input, other=0.0)
            acc = product(a, tl.trans(b), acc, WIDE)
        total = acc if APART or PARTS == 1 else total + acc
    is_there = (r < end_row)[:, None] & (n < OUTPUTS)[None, :]
    if APART:
        place = (own * num_rows + r).to(tl.int64)[:, None] * OUTPUTS + n[None, :]
        tl.store(out + place, total, mask=is_there)
    else:
        if BIASED:
            total += tl.load(bias + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        tl.store(out + r.to(tl.int64)[:, None] * out_r + n[None, :], total, mask=is_there)


@jit("num_rows")
def _add_parts(
    sums, bias, out, num_rows, out_r,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Some outputs of a row."""
    r, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = n < OUTPUTS
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_rows + r) * OUTPUTS + n
        total += tl.load(sums + place, mask=is_there, other=0.0)
    if BIASED:
        total += tl.load(bias + n, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + r * out_r + n, total, mask=is_there)


@cache
def num_parts(num_outputs: int, num_inputs: int) -> int:
    """Return into how many parts the inputs are cut, by the shape of the weight."""
    parts, num_columns = 1, -(-num_outputs // _COLUMNS)
    while parts * num_columns < _PROGRAMS and num_inputs >= 2 * parts * _LEAST_INPUTS:
        parts *= 2
    return parts


def multiply_into(
    out_RN: Tensor, x_RK: Tensor, weights: Sequence[Weight], bias_N: Tensor | None
) -> None:
    """Write x @ weight.T + bias, summed in float32 and rounded once.

    The outputs of several weights follow each other. The numbers of a row of x, of a weight and of
    the output are neighbours.
    """
    if not len(x_RK):
        return
    parts, first = num_parts(out_RN.shape[1], x_RK.shape[1]), 0
    for weight in weights:
        for piece_NK in _pieces(weight, x_RK.dtype):
            end = first + len(piece_NK)
            bias = None if bias_N is None else bias_N[first:end]
            _multiply_piece(out_RN[:, first:end], x_RK, piece_NK, bias, parts)
            first = end


def _pieces(weight: Weight, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the numbers of a weight, some outputs at a time if they are widened."""
    if isinstance(weight, Tensor):
        yield weight
        return
    for first, end in weight.pieces(_AT_ONCE):
        yield weight.in_order(dtype, first, end)


def _multiply_piece(
    out_RN: Tensor, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, parts: int
) -> None:
    num_rows, (num_outputs, num_inputs) = len(x_RK), weight_NK.shape
    form = next((each for each in _forms if num_rows <= each.rows), _forms[-1])
    is_apart = parts > 1 and num_rows <= _MOST_APART
    target, bias = out_RN, out_RN if bias_N is None else bias_N
    if is_apart:
        target = torch.empty(parts, num_rows, num_outputs, device=x_RK.device)
    row_tiles = -(-num_rows // form.rows)
    programs = row_tiles * -(-num_outputs // form.columns)
    _multiply[(programs, parts if is_apart else 1)](
        x_RK, weight_NK, bias, target, bias, num_rows, row_tiles, 0, 0,
        x_RK.stride(0), out_RN.stride(0), 0, *weight_NK.stride(),
        INPUTS=num_inputs, OUTPUTS=num_outputs, PARTS=parts, STEP=_step(x_RK),
        ROWS=form.rows, COLUMNS=form.columns,
        APART=is_apart, BIASED=bias_N is not None, GROUPED=False, WIDE=_is_wide(x_RK),
        num_warps=form.num_warps, num_stages=form.num_stages,
    )  # fmt: skip
    if is_apart:
        block = min(_SUMMED, 1 << (num_outputs - 1).bit_length())
        _add_parts[(num_rows, -(-num_outputs // block))](
            target, bias, out_RN, num_rows, out_RN.stride(0),
            OUTPUTS=num_outputs, PARTS=parts, BLOCK=block, BIASED=bias_N is not None,
            num_warps=_SUM_WARPS,
        )  # fmt: skip


def _step(x_RK: Tensor) -> int:
    return _STEP_BYTES // x_RK.element_size()


def _is_wide(x_RK: Tensor) -> bool:
    return is_interpreted() and x_RK.dtype == torch.bfloat16


def product_of(x: Tensor, weight: Weight, bias_N: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias for rows [..., K], as torch's `linear` does."""
    rows_RK = x.reshape(-1, x.shape[-1])
    if rows_RK.stride(-1) != 1:
        rows_RK = rows_RK.contiguous()
    out_RN = x.new_empty(len(rows_RK), weight.shape[0])
    multiply_into(out_RN, rows_RK, (weight,), bias_N)
    return out_RN.view(*x.shape[:-1], weight.shape[0])


class RowTiles(NamedTuple):
    """The rows of experts, which stand expert by expert, in tiles of one expert each."""

    tiles_T3: Tensor  # int64: expert, first row, the row after the expert's last one
    num_rows: int  # of a tile


def row_tiles(expert_R: Tensor, num_experts: int) -> RowTiles:
    """Return the tiles of rows whose experts ascend, without a wait for the device.

    The number of tiles follows from those of rows and experts. Tiles behind the last one are empty.
    """
    device, num_rows = expert_R.device, len(expert_R)
    form = _forms[0] if num_rows <= _forms[0].rows * num_experts else _forms[-2]
    first_E1 = torch.searchsorted(expert_R, torch.arange(num_experts + 1, device=device))
    end_E = (-(-first_E1.diff() // form.rows)).cumsum(0)  # of each expert's tiles
    tile_T = torch.arange(num_experts + num_rows // form.rows, device=device)
    expert_T = torch.searchsorted(end_E, tile_T, right=True)
    known_T = expert_T.clamp(max=num_experts - 1)
    last_T = first_E1[known_T + 1]
    nth_T = tile_T - (end_E[known_T] - -(-first_E1.diff() // form.rows)[known_T])
    first_T = torch.where(expert_T < num_experts, first_E1[known_T] + nth_T * form.rows, last_T)
    return RowTiles(torch.stack((known_T, first_T, last_T), 1), form.rows)


def expert_products(
    x_RK: Tensor, weights: Sequence[Weight], bias_EN: Tensor | None, tiles: RowTiles
) -> Tensor:
    """Return the product of each row with its expert's weight, [R, N]; a weight may be a view.

    The outputs of several weights follow each other. An expert's inputs are one part.
    """
    out_RN = x_RK.new_empty(len(x_RK), sum(each.shape[1] for each in weights))
    first = 0
    for weight in weights:
        end = first + weight.shape[1]
        bias = None if bias_EN is None else bias_EN[:, first:end].contiguous()
        for first_expert, piece_ENK in _expert_pieces(weight, x_RK.dtype):
            own = None if bias is None else bias[first_expert:]
            _multiply_experts(out_RN[:, first:end], x_RK, piece_ENK, own, tiles, first_expert)
        first = end
    return out_RN


def _expert_pieces(weight: Weight, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield the numbers of some experts, and which is the first; all, if nothing is widened."""
    if isinstance(weight, Tensor):
        yield 0, weight
        return
    num_experts, *sizes = weight.shape
    step = max(1, _AT_ONCE // math.prod(sizes))
    for first in range(0, num_experts, step):
        yield first, weight.experts(slice(first, first + step)).in_order(dtype)


def _multiply_experts(
    out_RN: Tensor,
    x_RK: Tensor,
    weight_ENK: Tensor,
    bias_EN: Tensor | None,
    tiles: RowTiles,
    first_expert: int,
) -> None:
    """Write the products of the rows whose expert is one of some."""
    (num_rows, num_inputs), (num_experts, num_outputs, _) = x_RK.shape, weight_ENK.shape
    form = next(each for each in _forms if each.rows == tiles.num_rows)
    bias = out_RN if bias_EN is None else bias_EN
    num_tiles = len(tiles.tiles_T3)
    programs = num_tiles * -(-num_outputs // form.columns)
    _multiply[(programs, 1)](
        x_RK, weight_ENK, bias, out_RN, tiles.tiles_T3, num_rows, num_tiles,
        first_expert, num_experts, x_RK.stride(0), out_RN.stride(0), *weight_ENK.stride(),
        INPUTS=num_inputs, OUTPUTS=num_outputs, PARTS=1, STEP=_step(x_RK),
        ROWS=form.rows, COLUMNS=form.columns,
        APART=False, BIASED=bias_EN is not None, GROUPED=True, WIDE=_is_wide(x_RK),
        num_warps=form.num_warps, num_stages=form.num_stages,
    )  # fmt: skip


def leave_out_least() -> None:
    """Let the form with 64 rows serve fewer rows, too, from now on."""
    del _forms[:-2]


def find_fault(
    products: Iterable[tuple[Sequence[Weight], Tensor | None]], like: Tensor
) -> str | None:
    """Return which product has other bits in a larger batch, by a trial; None: none has.

    Every form is compiled for each shape on the way, so no request waits for that. `like`: has the
    device and the number type of rows.
    """
    tried: set[tuple[object, ...]] = set()
    for weights, bias_N in products:
        shapes = [(type(each), *each.shape) for each in weights]
        kind = (*shapes, bias_N is None)
        if kind in tried:
            continue
        tried.add(kind)
        num_outputs, num_inputs = sum(each.shape[0] for each in weights), weights[0].shape[1]
        generator = torch.Generator(like.device).manual_seed(0)
        shape = _TRIED[-1], num_inputs
        x_RK = torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
        whole_RN = x_RK.new_empty(len(x_RK), num_outputs)
        multiply_into(whole_RN, x_RK, weights, bias_N)
        for num in _TRIED[:-1]:
            # The last rows: each is at another place in its tile.
            found_RN = whole_RN.new_empty(num, num_outputs)
            multiply_into(found_RN, x_RK[-num:], weights, bias_N)
            if not torch.equal(found_RN, whole_RN[-num:]):
                return f"a product of {num_inputs} inputs and {num_outputs} outputs"
    return None
