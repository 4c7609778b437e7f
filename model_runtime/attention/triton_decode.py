"""The GPU's read for one query token per sequence: unrotated keys, rotated in registers.

A program takes one sequence, one key head and one split of the sequence's keys, tile by tile. A
tile's keys are rotated by the angles of their offsets in the tile, from one small table for all
tiles. The query is rotated to its own position, then rotated back by the tile's start.

Splits are merged by their log-sum-exp. So are several key ranges of one query, which may place the
same query and the same pages at other positions.

Shapes: T = flat query tokens, B = sequences with one query token, S = sequences or tables,
H = query heads, K = key heads, M = splits of the keys, V = value dimensions, N = pages,
O = offsets in a page, P = rotated pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton.language as tl
from torch import Tensor

from model_runtime.attention.key_range import KeyRange
from model_runtime.attention.paged_attention import LayerRead
from model_runtime.attention.triton_pieces import (
    LOG2_E,
    angles,
    capped,
    is_interpreted,
    jit,
    key_strides,
    padded,
    product,
    row,
    tile_len,
)
from model_runtime.batch import Batch
from model_runtime.cache.rope_tables import TILE

_MERGE = tl.constexpr(16)  # splits that the merge holds at once
_LEAST_TILES = 8  # of a split; with fewer, the partial outputs are not small beside the keys


@dataclass(frozen=True, slots=True)
class Tuning:
    """The compile options of the kernel, and the number of programs per processor."""

    num_warps: int = 4
    num_stages: int = 5  # 5: a page's number and two tiles are in flight; 3: one tile
    programs_per_processor: int = 2  # run at the same time; splits are chosen to fill them


_AS_COMPILED = Tuning()


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over some of the keys."""

    out_BHMV: Tensor  # float32
    lse_BHM: Tensor  # float32, log-sum-exp of the scores; -inf if no key was seen


@jit
def _decode(
    query, keys, values, page_table, page_positions, sequences, query_start, table_ids,
    begins, ends, positions,
    start_cos, start_sin, offset_cos, offset_sin, tile_cos, tile_sin, factors, log_lens,
    out, lses,
    scaling, softcap, num_starts, table_width,
    query_t, query_h, out_row, out_head, out_split,
    KEY_N: tl.constexpr, KEY_K: tl.constexpr, KEY_O: tl.constexpr, KEY_D: tl.constexpr,
    VALUE_N: tl.constexpr, VALUE_K: tl.constexpr, VALUE_O: tl.constexpr, VALUE_V: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, TILE_ANGLES: tl.constexpr,
    ROWS: tl.constexpr, PAIRS_2: tl.constexpr, REST_2: tl.constexpr, VALUES_2: tl.constexpr,
    MAPPED: tl.constexpr, CAPPED: tl.constexpr, DIRECT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One sequence, key head and split. DIRECT: it is the only split, and writes the output."""
    place, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences + place)
    token = tl.load(query_start + sequence)
    table_id = tl.load(table_ids + sequence)
    begin = tl.load(begins + sequence).to(tl.int32)
    end = tl.load(ends + sequence).to(tl.int32)
    position = tl.load(positions + sequence)
    r, t = tl.arange(0, ROWS), tl.arange(0, TILE)
    p, e, v = tl.arange(0, PAIRS_2), tl.arange(0, REST_2), tl.arange(0, VALUES_2)

    log_len = tl.load(log_lens + table_id)
    if log_len > 0:
        scaling = scaling * tl.maximum(1.0, tl.log(position.to(tl.float32) + 1.0) / log_len)
    rows = query + token * query_t + (head * GROUP + r)[:, None] * query_h
    is_row = (r < GROUP)[:, None]
    starts, offsets = table_id * num_starts * PAIRS + p, table_id * PAGE * PAIRS + p
    if PAIRS > 0:
        own_cos, own_sin = angles(
            start_cos, start_sin, offset_cos, offset_sin,
            starts + position // PAGE * PAIRS, offsets + position % PAGE * PAIRS, p < PAIRS,
        )  # fmt: skip
        is_pair = is_row & (p < PAIRS)[None, :]
        scale = scaling * tl.load(factors + table_id)
        first = tl.load(rows + p[None, :], mask=is_pair, other=0.0).to(tl.float32) * scale
        second = tl.load(rows + (p + PAIRS)[None, :], mask=is_pair, other=0.0).to(tl.float32)
        second = second * scale
        if MAPPED:
            first_rotated = (first * own_cos - second * own_sin).to(keys.dtype.element_ty)
            second_rotated = (second * own_cos + first * own_sin).to(keys.dtype.element_ty)
    if REST > 0:
        is_rest = is_row & (e < REST)[None, :]
        rest = tl.load(rows + (e + 2 * PAIRS)[None, :], mask=is_rest, other=0.0)
        rest = (rest.to(tl.float32) * scaling).to(keys.dtype.element_ty)

    table, placed = page_table + sequence * table_width, page_positions + sequence * table_width
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES_2], tl.float32)
    # Each sequence's own tiles are split equally, whatever the other sequences are. A captured step
    # has as many splits as the longest context needs.
    first_tile, last_tile = begin // TILE, (end + TILE - 1) // TILE
    num_splits = tl.num_programs(2)
    tiles_per_split = (last_tile - first_tile + num_splits - 1) // num_splits
    tile_begin = first_tile + split * tiles_per_split
    tile_end = tl.minimum(tile_begin + tiles_per_split, last_tile)
    tile_end = tl.where(begin < end, tile_end, tile_begin)
    for tile in range(tile_begin, tile_end):
        start = tile * TILE
        # An index outside the range loads a key of the range again, with a probability of zero.
        # Loads without masks are cheaper, and memory that may hold NaN is never read.
        index = tl.minimum(tl.maximum(start + t, begin), end - 1)
        is_seen = index == start + t
        page = tl.load(table + index // PAGE).to(tl.int64)
        key = keys + page * KEY_N + (head * KEY_K + index % PAGE * KEY_O)
        scores = tl.zeros([ROWS, TILE], tl.float32)
        if PAIRS > 0:
            is_angle = (p < PAIRS)[None, :]
            at = key[:, None] + p[None, :] * KEY_D
            one = row(at, is_angle, PAIRS == PAIRS_2).to(tl.float32)
            two = row(at + PAIRS * KEY_D, is_angle, PAIRS == PAIRS_2).to(tl.float32)
            if MAPPED:
                at = tl.load(placed + index // PAGE) + index % PAGE
                cos, sin = angles(
                    start_cos, start_sin, offset_cos, offset_sin,
                    starts[None, :] + (at // PAGE * PAIRS)[:, None],
                    offsets[None, :] + (at % PAGE * PAIRS)[:, None], is_angle,
                )  # fmt: skip
            else:
                back_cos, back_sin = angles(
                    start_cos, start_sin, offset_cos, offset_sin,
                    starts + start // PAGE * PAIRS, offsets + start % PAGE * PAIRS, p < PAIRS,
                )  # fmt: skip
                cos = own_cos * back_cos + own_sin * back_sin
                sin = own_sin * back_cos - own_cos * back_sin
                first_rotated = (first * cos - second * sin).to(keys.dtype.element_ty)
                second_rotated = (second * cos + first * sin).to(keys.dtype.element_ty)
                in_tile = table_id * TILE_ANGLES * PAIRS + t[:, None] * PAIRS + p[None, :]
                cos = row(tile_cos + in_tile, is_angle, PAIRS == PAIRS_2)
                sin = row(tile_sin + in_tile, is_angle, PAIRS == PAIRS_2)
            rotated = (one * cos - two * sin).to(keys.dtype.element_ty)
            scores = product(first_rotated, tl.trans(rotated), scores, WIDE)
            rotated = (two * cos + one * sin).to(keys.dtype.element_ty)
            scores = product(second_rotated, tl.trans(rotated), scores, WIDE)
        if REST > 0:
            at = key[:, None] + (e + 2 * PAIRS)[None, :] * KEY_D
            plain = row(at, (e < REST)[None, :], REST == REST_2)
            scores = product(rest, tl.trans(plain), scores, WIDE)
        if CAPPED:
            scores = capped(scores, softcap)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # The row sum adds the rounded probabilities, because the product uses the rounded ones.
        probs = tl.exp2(scores - new_max[:, None]).to(values.dtype.element_ty)
        keep = tl.exp2(row_max - new_max)
        row_sum = row_sum * keep + tl.sum(probs.to(tl.float32), 1)
        row_max = new_max
        at = values + page * VALUE_N + (head * VALUE_K + index % PAGE * VALUE_O)
        at = at[:, None] + v[None, :] * VALUE_V
        value = row(at, (v < VALUES)[None, :], VALUES == VALUES_2)
        acc = product(probs, value, acc * keep[:, None], WIDE)

    # A row that saw no key becomes zeros, so that the merge adds nothing for its sum of zero.
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    line = token if DIRECT else place.to(tl.int64)
    heads = head * GROUP + r
    target = out + line * out_row + heads[:, None] * out_head + split * out_split + v[None, :]
    tl.store(target, acc, mask=is_row & (v < VALUES)[None, :])
    if not DIRECT:
        num_heads = tl.num_programs(1) * GROUP
        lse = (row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))) * 0.6931471805599453
        lse = tl.where(row_sum > 0, lse, float("-inf"))
        tl.store(lses + (line * num_heads + heads) * num_splits + split, lse, mask=r < GROUP)


@jit
def _merge(
    partials, lses, sinks, sequences, query_start, out, num_splits, out_row, out_head,
    VALUES: tl.constexpr, VALUES_2: tl.constexpr, SPLITS: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """One sequence and query head: its splits weighted by their log-sum-exp, with the sink's."""
    place, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + tl.load(sequences + place))
    first = (place.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    v, m = tl.arange(0, VALUES_2), tl.arange(0, SPLITS)
    none = float("-inf")
    every = tl.load(lses + first + m, mask=m < num_splits, other=none)
    lse_max = tl.max(every, 0)
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32)
        lse_max = tl.maximum(lse_max, sink)
    lse_max = tl.where(lse_max == none, 0.0, lse_max)
    weight = tl.sum(tl.exp(every - lse_max), 0)
    if SUNK:
        weight += tl.exp(sink - lse_max)
    acc = tl.zeros([VALUES_2], tl.float32)
    for at in range(0, num_splits, _MERGE):
        i = at + tl.arange(0, _MERGE)
        is_split = i < num_splits
        some = tl.exp(tl.load(lses + first + i, mask=is_split, other=none) - lse_max)
        part = tl.load(
            partials + (first + i)[:, None] * VALUES + v[None, :],
            mask=is_split[:, None] & (v < VALUES)[None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(some[:, None] * part, 0)
    acc = acc / tl.where(weight > 0, weight, 1.0)
    tl.store(out + token * out_row + head * out_head + v, acc, mask=v < VALUES)


@cache
def _num_processors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; 8 under the interpreter, so keys are split."""
    if device.type != "cuda":
        return 8
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found


@lru_cache(maxsize=1024)  # every layer of a step calls it with the same arguments
def num_splits(num_programs: int, num_tiles: int, most_programs: int) -> int:
    """Return the number of splits of `num_tiles`, for each of `num_programs` sequences and heads.

    It is the smallest number that keeps at least 95% as much of the device busy as the best choice.
    All programs of a wave take about as long, and the last wave is seldom full.
    """
    choices = range(1, max(1, min(num_tiles // _LEAST_TILES, most_programs)) + 1)
    busy = {}
    for choice in choices:
        waves = num_programs * choice / most_programs
        busy[choice] = waves / math.ceil(waves)
    best = max(busy.values())
    return next(choice for choice in choices if busy[choice] >= 0.95 * best)


def decode(
    read: LayerRead,
    batch: Batch,
    ranges: Sequence[KeyRange],
    out_THV: Tensor,
    tuning: Tuning = _AS_COMPILED,
) -> None:
    """Write the rows of the batch's single query tokens to `out_THV`; no other row is changed.

    A key that several ranges see counts once in each. The caller must avoid overlaps.
    """
    is_whole = len(ranges) == 1 and read.sinks_H is None
    partials = [_launch(read, batch, keys, out_THV, tuning, is_whole=is_whole) for keys in ranges]
    given = [partial for partial in partials if partial is not None]
    if given:
        merge(given, read.sinks_H, batch, out_THV)


def merge(
    partials: Sequence[Partial], sinks_H: Tensor | None, batch: Batch, out_THV: Tensor
) -> None:
    """Merge the partial attentions, and write the result to the single tokens' rows."""
    out_BHMV, lse_BHM = partials[0].out_BHMV, partials[0].lse_BHM
    if len(partials) > 1:
        out_BHMV = torch.cat([partial.out_BHMV for partial in partials], 2)
        lse_BHM = torch.cat([partial.lse_BHM for partial in partials], 2)
    num_sequences, num_heads, splits, value_dim = out_BHMV.shape
    _merge[(num_sequences, num_heads)](
        out_BHMV, lse_BHM, lse_BHM if sinks_H is None else sinks_H,
        batch.single_B, batch.cu_seqlens_S1, out_THV, splits, *out_THV.stride()[:2],
        VALUES=value_dim, VALUES_2=padded(value_dim), SPLITS=padded(splits),
        SUNK=sinks_H is not None,
    )  # fmt: skip


def _launch(
    read: LayerRead,
    batch: Batch,
    keys: KeyRange,
    out_THV: Tensor,
    tuning: Tuning,
    *,
    is_whole: bool,
) -> Partial | None:
    """Run the kernel on one key range, and return its partial attention.

    `is_whole`: this is the only range. If one split suffices, the kernel then writes to `out_THV`,
    and None is returned.
    """
    _, num_heads, dim = read.query_THD.shape
    num_key_heads, _, page_size = read.keys_NKDO.shape[1:]
    value_dim = read.values_NKOV.shape[-1]
    group, pairs = num_heads // num_key_heads, read.tables.num_pairs
    query_THD = read.query_THD if read.query_THD.stride(-1) == 1 else read.query_THD.contiguous()
    num_sequences = len(batch.single_B)
    tile = tile_len(TILE, max(dim, value_dim), read.keys_NKDO.dtype)
    num_tiles = -(-keys.most // tile) + 1  # a range seldom begins at a tile's start
    most_programs = _num_processors(query_THD.device) * tuning.programs_per_processor
    splits = num_splits(num_sequences * num_key_heads, num_tiles, most_programs)
    splits = -(-num_tiles // -(-num_tiles // splits))
    partial = None
    out, lses, strides = out_THV, out_THV, (*out_THV.stride()[:2], 0)
    if splits > 1 or not is_whole:
        shape = (num_sequences, num_heads, splits)
        partial = Partial(
            torch.empty(*shape, value_dim, device=query_THD.device),
            torch.empty(shape, device=query_THD.device),
        )
        out, lses, strides = partial.out_BHMV, partial.lse_BHM, partial.out_BHMV.stride()[:3]
    rest = dim - 2 * pairs
    map_SN = keys.page_position_SN
    softcap = read.softcap or 0.0
    _decode[(num_sequences, num_key_heads, splits)](
        query_THD, read.keys_NKDO, read.values_NKOV, batch.page_table_SN,
        batch.page_table_SN if map_SN is None else map_SN,
        batch.single_B, batch.cu_seqlens_S1, batch.table_id_S,
        keys.begin_S, keys.end_S, keys.position_S,
        *read.tables.device_tensors,
        out, lses,
        read.scaling * (1.0 if softcap else LOG2_E), softcap,
        read.tables.starts.cos.shape[1], batch.page_table_SN.shape[1],
        *query_THD.stride()[:2], *strides, *key_strides(read.keys_NKDO), *read.values_NKOV.stride(),
        GROUP=group, PAIRS=pairs, REST=rest, VALUES=value_dim, PAGE=page_size,
        ROWS=padded(group), PAIRS_2=padded(pairs), REST_2=padded(rest), VALUES_2=padded(value_dim),
        TILE=tile, TILE_ANGLES=TILE,
        MAPPED=map_SN is not None, CAPPED=softcap > 0, DIRECT=partial is None,
        WIDE=is_interpreted() and read.keys_NKDO.dtype == torch.bfloat16,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    return partial
