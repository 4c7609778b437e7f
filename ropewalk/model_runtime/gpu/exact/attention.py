"""The GPU's read of the cache whose rows have the same bits in any batch.

One kernel reads for decodes, prompts and drafts. A program takes one key head, a few tokens of one
sequence and a run of pieces of its context (exact_work.py). A tile of keys is multiplied in the
same shape for any number of tokens. A token adds the keys of a piece in the order of their
positions, and then the pieces in theirs. Keys that a token does not see change no bit of it.

As in the decode kernel of other servings, a tile's keys are rotated by their offsets in the tile,
and the queries back by the tile's start.

Shapes: T = flat query tokens, H = query heads, V = value dimensions, L = slots for pieces.
"""

from typing import Self

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.exact_work import (
    FIELDS,
    PIECE_TILES,
    ExactCut,
    ExactWork,
    aligned,
)
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import TILE
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.cards.card import card_of
from ropewalk.model_runtime.gpu.cards.tuning import Sizes, sizes_of
from ropewalk.model_runtime.gpu.launch import is_interpreted, jit
from ropewalk.model_runtime.gpu.primitives import (
    KERNEL_LOG2_E,
    LOG2_E,
    angles,
    capped,
    key_strides,
    padded,
    product,
    row,
)
from ropewalk.model_runtime.transfer import make_current

_MOST_ROWS = 64  # query heads of the tokens of a program
_WARPS, _STAGES = 8, 3
_MERGE_WARPS = 4
_PROGRAMS = 1  # of a processor that run at the same time: all registers are taken
_STORED_BYTES = 2**26  # of the pieces that are stored
_AT_ONCE = tl.constexpr(16)  # pieces whose loads are in flight while they are added
_PIECE_TILES = tl.constexpr(PIECE_TILES)
_FIELDS = tl.constexpr(FIELDS)


@jit
def _joined(most, total, acc, piece_most, piece_total, piece_acc):
    """Add a piece to what a row has so far, in units of log base 2. An empty piece changes nothing.

    The sums are written as one instruction each, so that all kernels have the same.
    """
    new_most = tl.maximum(most, piece_most)
    finite = tl.where(new_most == float("-inf"), 0.0, new_most)
    kept, added = tl.exp2(most - finite), tl.exp2(piece_most - finite)
    total = tl.fma(total, kept, piece_total * added)
    acc = tl.fma(acc, kept[:, None] + tl.zeros_like(acc), piece_acc * added[:, None])
    return new_most, total, acc


@jit("page_table", "entries", "table_ids", "window", "num_starts", "table_width", "num_heads")
def _read(
    query, keys, values, page_table, entries, table_ids,
    start_cos, start_sin, offset_cos, offset_sin, tile_cos, tile_sin, factors, log_lens,
    sinks, out, mosts, totals, partials,
    scaling, softcap, window, num_starts, table_width, num_heads,
    query_t, query_h, out_t, out_h,
    KEY_N: tl.constexpr, KEY_K: tl.constexpr, KEY_O: tl.constexpr, KEY_D: tl.constexpr,
    VALUE_N: tl.constexpr, VALUE_K: tl.constexpr, VALUE_O: tl.constexpr, VALUE_V: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, TILE_ANGLES: tl.constexpr,
    ROWS: tl.constexpr, PAIRS_2: tl.constexpr, REST_2: tl.constexpr, VALUES_2: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One key head and one entry."""
    head, entry = tl.program_id(0), entries + _FIELDS * tl.program_id(1)
    sequence, token, num_tokens = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if num_tokens == 0:
        return
    first_position, first_piece = tl.load(entry + 3), tl.load(entry + 4)
    end_piece, slot, num_pieces = tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    table_id = tl.load(table_ids + sequence)
    r, t = tl.arange(0, ROWS), tl.arange(0, TILE)
    p, e, v = tl.arange(0, PAIRS_2), tl.arange(0, REST_2), tl.arange(0, VALUES_2)
    nth = r // GROUP  # token of a row
    is_row = nth < num_tokens
    # Rows behind the last token repeat it, and are not stored.
    nth = tl.minimum(nth, num_tokens - 1)
    position = first_position + nth
    last = first_position + num_tokens - 1
    begin = first_position * 0
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0)
    heads = head * GROUP + r % GROUP
    flat = (token + nth).to(tl.int64)
    kind = keys.dtype.element_ty

    scale = tl.zeros([ROWS], tl.float32) + scaling
    log_len = tl.load(log_lens + table_id)
    if log_len > 0:
        scale = scale * tl.maximum(1.0, tl.log(position.to(tl.float32) + 1.0) / log_len)
    rows = query + flat[:, None] * query_t + heads[:, None] * query_h
    starts, offsets = table_id * num_starts * PAIRS + p, table_id * PAGE * PAIRS + p
    if PAIRS > 0:
        is_angle = (p < PAIRS)[None, :]
        own_cos, own_sin = angles(
            start_cos, start_sin, offset_cos, offset_sin,
            starts[None, :] + (position // PAGE * PAIRS)[:, None],
            offsets[None, :] + (position % PAGE * PAIRS)[:, None], is_angle,
        )  # fmt: skip
        factor = tl.load(factors + table_id)
        a = tl.load(rows + p[None, :], mask=is_angle, other=0.0).to(tl.float32)
        b = tl.load(rows + (p + PAIRS)[None, :], mask=is_angle, other=0.0).to(tl.float32)
        a, b = a * (scale * factor)[:, None], b * (scale * factor)[:, None]
        first, second = a * own_cos - b * own_sin, b * own_cos + a * own_sin
    if REST > 0:
        is_rest = (e < REST)[None, :]
        rest = tl.load(rows + (e + 2 * PAIRS)[None, :], mask=is_rest, other=0.0)
        rest = (rest.to(tl.float32) * scale[:, None]).to(kind)

    table = page_table + sequence * table_width
    none = float("-inf")
    most, total = tl.full([ROWS], none, tl.float32), tl.zeros([ROWS], tl.float32)
    joined = tl.zeros([ROWS, VALUES_2], tl.float32)
    for piece in range(first_piece, end_piece):
        row_max, row_sum = tl.full([ROWS], none, tl.float32), tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUES_2], tl.float32)
        first_tile = tl.maximum(piece * _PIECE_TILES, begin // TILE)
        end_tile = tl.minimum((piece + 1) * _PIECE_TILES, last // TILE + 1)
        for tile in range(first_tile, end_tile):
            start = tile * TILE
            # An index outside loads a key of the context again, which no row sees here. Memory that
            # may hold NaN is never read.
            index = tl.minimum(tl.maximum(start + t, begin), last)
            if PAGE % TILE == 0:
                # The tile is in one page, so its number is loaded once and not for every key.
                page = tl.load(table + start // PAGE).to(tl.int64)
                offset = index - start // PAGE * PAGE
            else:
                page = tl.load(table + index // PAGE).to(tl.int64)
                offset = index % PAGE
            key = keys + page * KEY_N + (head * KEY_K + offset * KEY_O)
            scores = tl.zeros([ROWS, TILE], tl.float32)
            if PAIRS > 0:
                place = key[:, None] + p[None, :] * KEY_D
                one = row(place, is_angle, PAIRS == PAIRS_2).to(tl.float32)
                two = row(place + PAIRS * KEY_D, is_angle, PAIRS == PAIRS_2).to(tl.float32)
                back_cos, back_sin = angles(
                    start_cos, start_sin, offset_cos, offset_sin,
                    starts + start // PAGE * PAIRS, offsets + start % PAGE * PAIRS, p < PAIRS,
                )  # fmt: skip
                cos, sin = back_cos[None, :], back_sin[None, :]
                first_rotated = (first * cos + second * sin).to(kind)
                second_rotated = (second * cos - first * sin).to(kind)
                place = table_id * TILE_ANGLES * PAIRS + t[:, None] * PAIRS + p[None, :]
                cos = row(tile_cos + place, is_angle, PAIRS == PAIRS_2)
                sin = row(tile_sin + place, is_angle, PAIRS == PAIRS_2)
                rotated = (one * cos - two * sin).to(kind)
                scores = product(first_rotated, tl.trans(rotated), scores, WIDE)
                rotated = (two * cos + one * sin).to(kind)
                scores = product(second_rotated, tl.trans(rotated), scores, WIDE)
            if REST > 0:
                place = key[:, None] + (e + 2 * PAIRS)[None, :] * KEY_D
                plain = row(place, is_rest, REST == REST_2)
                scores = product(rest, tl.trans(plain), scores, WIDE)
            if CAPPED:
                scores = capped(scores, softcap)
            seen = (start + t)[None, :]
            is_seen = seen <= position[:, None]
            if WINDOWED:
                is_seen = is_seen & (seen > position[:, None] - window)
            scores = tl.where(is_seen, scores, none)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row may see no key of the first tiles.
            finite = tl.where(new_max == none, 0.0, new_max)
            # The row sum adds the rounded probabilities, because the product uses the rounded ones.
            probs = tl.exp2(scores - finite[:, None]).to(kind)
            keep = tl.exp2(row_max - finite)
            row_sum = row_sum * keep + tl.sum(probs.to(tl.float32), 1)
            row_max = new_max
            place = values + page * VALUE_N + (head * VALUE_K + offset * VALUE_O)
            place = place[:, None] + v[None, :] * VALUE_V
            value = row(place, (v < VALUES)[None, :], VALUES == VALUES_2)
            acc = product(probs, value, acc * keep[:, None], WIDE)
        if slot >= 0:
            at = slot + nth * num_pieces + (piece - first_piece)
            line = at.to(tl.int64) * num_heads + heads
            tl.store(mosts + line, row_max, mask=is_row)
            tl.store(totals + line, row_sum, mask=is_row)
            is_value = is_row[:, None] & (v < VALUES)[None, :]
            tl.store(partials + line[:, None] * VALUES + v[None, :], acc, mask=is_value)
        else:
            most, total, joined = _joined(most, total, joined, row_max, row_sum, acc)
    if slot < 0:
        if SUNK:
            # A sink is a last piece without a value.
            sink = tl.load(sinks + heads).to(tl.float32) * KERNEL_LOG2_E
            ones, zeros = tl.full([ROWS], 1.0, tl.float32), tl.zeros([ROWS, VALUES_2], tl.float32)
            most, total, joined = _joined(most, total, joined, sink, ones, zeros)
        joined = joined / total[:, None]
        target = out + flat[:, None] * out_t + heads[:, None] * out_h + v[None, :]
        tl.store(target, joined, mask=is_row[:, None] & (v < VALUES)[None, :])


@jit("merged")
def _merge(
    mosts, totals, partials, sinks, merged, out, out_t, out_h,
    VALUES: tl.constexpr, VALUES_2: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """One token and query head: its stored pieces in the order of their positions."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    place = merged + 3 * tl.program_id(0)
    token, slot, num_pieces = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    if num_pieces == 0:
        return  # the program of the token has written it
    v, one = tl.arange(0, VALUES_2)[None, :], tl.arange(0, 1)
    most, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    acc = tl.zeros([1, VALUES_2], tl.float32)
    for begin in range(0, num_pieces, _AT_ONCE):
        for nth in tl.static_range(_AT_ONCE):
            is_piece = begin + nth < num_pieces
            line = (slot + tl.minimum(begin + nth, num_pieces - 1)).to(tl.int64) * num_heads + head
            piece_most = tl.load(mosts + line + one, mask=is_piece, other=float("-inf"))
            piece_total = tl.load(totals + line + one, mask=is_piece, other=0.0)
            is_value = is_piece & (v < VALUES)
            part = tl.load(partials + line * VALUES + v, mask=is_value, other=0.0)
            most, total, acc = _joined(most, total, acc, piece_most, piece_total, part)
    if SUNK:
        sink = tl.load(sinks + head + one).to(tl.float32) * KERNEL_LOG2_E
        ones, zeros = tl.full([1], 1.0, tl.float32), tl.zeros([1, VALUES_2], tl.float32)
        most, total, acc = _joined(most, total, acc, sink, ones, zeros)
    acc = acc / total[:, None]
    tl.store(out + token.to(tl.int64) * out_t + head * out_h + v, acc, mask=v < VALUES)


def most_tokens(sizes: Sizes) -> int:
    """Return the tokens that a program takes in a layer, at least one."""
    return max(1, _MOST_ROWS // sizes.group)


def exact_cut_of(read: LayerRead) -> ExactCut:
    """Return how a layer cuts the tokens and contexts of its step."""
    sizes, (num_heads, value_dim) = sizes_of(read), _outputs(read)
    num_programs = card_of(read.query_THD.device).num_processors * _PROGRAMS
    return ExactCut(
        read.sliding_window,
        sizes.tile * PIECE_TILES,
        most_tokens(sizes),
        max(1, num_programs // read.keys_NKDO.shape[1]),
        aligned(_STORED_BYTES // (num_heads * (value_dim + 2) * 4)),
    )


def _outputs(read: LayerRead) -> tuple[int, int]:
    return read.query_THD.shape[1], read.values_NKOV.shape[-1]


class ExactAttention(TritonAttention):
    """One step's reads and writes, by kernels whose order of sums follows from positions alone."""

    def __init__(self, batch: Batch) -> None:
        make_current(batch.page_T.device)
        self._batch = batch

    def of_group(self, batch: Batch) -> Self:
        """Return this backend over another group's pages; lists of the step are shared."""
        return type(self)(batch)

    def read(self, read: LayerRead) -> Tensor:
        """Return the attention of one layer, [T, H, V] in the query's dtype."""
        assert not read.tables.positions, "position methods were not refused"
        batch, device = self._batch, read.query_THD.device
        num_tokens, num_heads, dim = read.query_THD.shape
        num_key_heads, _, page_size = read.keys_NKDO.shape[1:]
        value_dim, sizes = read.values_NKOV.shape[-1], sizes_of(read)
        out_THV = torch.empty(
            num_tokens, num_heads, value_dim, dtype=read.query_THD.dtype, device=device
        )
        work = self._exact_work(exact_cut_of(read))
        stored_LHN = torch.empty(work.num_slots, num_heads, value_dim + 2, device=device)
        lines = stored_LHN.view(-1)
        num_lines = work.num_slots * num_heads
        stored = lines[:num_lines], lines[num_lines : 2 * num_lines], lines[2 * num_lines :]
        query_THD = (
            read.query_THD if read.query_THD.stride(-1) == 1 else read.query_THD.contiguous()
        )
        softcap, pairs = read.softcap or 0.0, read.tables.num_pairs
        rest = dim - 2 * pairs
        sinks = stored[0] if read.sinks_H is None else read.sinks_H
        is_sunk = read.sinks_H is not None
        _read[(num_key_heads, len(work.entries_EF))](
            query_THD, read.keys_NKDO, read.values_NKOV, batch.page_table_SN, work.entries_EF,
            batch.table_id_S, *read.tables.device_tensors, sinks, out_THV, *stored,
            read.scaling * (1.0 if softcap else LOG2_E), softcap, read.sliding_window or 0,
            read.tables.starts.cos.shape[1], batch.page_table_SN.shape[1], num_heads,
            *query_THD.stride()[:2], *out_THV.stride()[:2],
            *key_strides(read.keys_NKDO), *read.values_NKOV.stride(),
            GROUP=sizes.group, PAIRS=pairs, REST=rest, VALUES=value_dim, PAGE=page_size,
            TILE=sizes.tile, TILE_ANGLES=TILE,
            ROWS=padded(most_tokens(sizes) * sizes.group), PAIRS_2=padded(pairs),
            REST_2=padded(rest), VALUES_2=padded(value_dim),
            WINDOWED=bool(read.sliding_window), CAPPED=softcap > 0, SUNK=is_sunk,
            WIDE=is_interpreted() and read.keys_NKDO.dtype == torch.bfloat16,
            num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
        _merge[(len(work.merged_M3), num_heads)](
            *stored, sinks, work.merged_M3, out_THV, *out_THV.stride()[:2],
            VALUES=value_dim, VALUES_2=padded(value_dim), SUNK=is_sunk, num_warps=_MERGE_WARPS,
        )  # fmt: skip
        return out_THV

    def _exact_work(self, cut: ExactCut) -> ExactWork:
        """Return the tiles and pieces of the step for a layer's cut."""
        lists = self._batch.work_lists
        if cut not in lists:
            lists[cut] = ExactWork.of(self._batch.places_S, cut, self._batch.page_T.device)
        work: ExactWork = lists[cut]
        return work
