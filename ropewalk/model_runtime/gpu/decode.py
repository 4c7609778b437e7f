"""The GPU's read for one query token per sequence: unrotated keys, rotated in registers.

A program takes one key head and one entry of the step's work list (work_list.py): a piece of a
sequence's keys, tile by tile. A tile's keys are rotated by the angles of their offsets in the tile,
from one small table for all tiles. The query is rotated to its own position, then rotated back by
the tile's start.

A product has 16 rows at least, and the query heads of a key head are often fewer. Successive tokens
of one sequence, such as those of a draft, fill the other rows. Each sees the keys up to its own. So
a tile is loaded and rotated once for all of them.

Pieces are merged by their log-sum-exp. So are the ranges of a position method. Their pieces carry
the position of the query and the key map. Tiles begin anew with every period of the key map, so the
angles in a tile are the same for all tiles there, too.

Shapes: T = flat query tokens, B = sequences with one query token, S = sequences or tables,
H = query heads, K = key heads, L = slots for partial results, V = value dimensions, N = pages,
O = offsets in a page, P = rotated pairs.
"""

import torch
import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import TILE
from ropewalk.model_runtime.attention.work_list import Cut, WorkList
from ropewalk.model_runtime.gpu.cards.card import card_of
from ropewalk.model_runtime.gpu.cards.tuning import Tuning, sizes_of
from ropewalk.model_runtime.gpu.launch import is_interpreted, jit
from ropewalk.model_runtime.gpu.primitives import (
    KERNEL_LN_2,
    LOG2_E,
    angles,
    bounded,
    capped,
    key_strides,
    padded,
    product,
    row,
    scale_tensors,
)

_MERGE = tl.constexpr(16)  # pieces that the merge holds at once
_MOST_QUERY = tl.constexpr(30000.0)  # so that a rotated query is finite in float16
# Below every score. A row may see no key of a tile, and minus infinity less itself is no number.
_LEAST_SCORE = tl.constexpr(-3e38)


@jit(
    "page_table", "entries", "pieces", "query_start", "table_ids", "positions",
    "num_starts", "table_width",
)  # fmt: skip
def _decode(
    query, keys, values, page_table, entries, pieces, query_start, table_ids, positions,
    start_cos, start_sin, offset_cos, offset_sin, tile_cos, tile_sin, factors, log_lens,
    out, partials, lses, key_scales, value_scales,
    scaling, softcap, num_starts, table_width,
    query_t, query_h, out_t, out_h,
    KEY_N: tl.constexpr, KEY_K: tl.constexpr, KEY_O: tl.constexpr, KEY_D: tl.constexpr,
    VALUE_N: tl.constexpr, VALUE_K: tl.constexpr, VALUE_O: tl.constexpr, VALUE_V: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, TILE_ANGLES: tl.constexpr,
    ROWS: tl.constexpr, PAIRS_2: tl.constexpr, REST_2: tl.constexpr, VALUES_2: tl.constexpr,
    FIELDS: tl.constexpr, PLACED: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SUNK: tl.constexpr, WIDE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """One key head and one piece of a sequence. The only piece of one writes the output itself.

    The tokens that read the piece are the entry's sequence and those after it in the batch.

    WINDOW: keys that a token sees, itself included; 0: all before it.
    PLACED: the piece has its own position of the query and its own key map. Tiles begin anew with
    every period, and keys stand at their index without whole moduli, over the divisor.
    CODED: the pages have codes of eight bits. The query is multiplied by the scales of keys, and
    the output by those of values. Codes are multiplied as float16, which has each of them exactly,
    and rotated ones with three bits more than bfloat16.
    """
    head, entry = tl.program_id(0), entries + FIELDS * tl.program_id(1)
    sequence, slot = tl.load(entry), tl.load(entry + 3)
    begin, end = tl.load(entry + 1), tl.load(entry + 2)
    if begin == end:
        return
    num_tokens = tl.load(entry + 4)
    num_pieces = tl.load(pieces + 2 * sequence + 1)
    token = tl.load(query_start + sequence)
    table_id = tl.load(table_ids + sequence)
    true_position = tl.load(positions + sequence)
    position = true_position
    kind = keys.dtype.element_ty
    angle_kind = tl.float32
    if CODED:
        kind = tl.float16
        angle_kind = tl.float16
    first_tile, end_tile = begin // TILE, (end + TILE - 1) // TILE
    if PLACED:
        position, period = tl.load(entry + 5), tl.load(entry + 6)
        modulus, divisor = tl.load(entry + 7), tl.load(entry + 8)
        per_period = (period + TILE - 1) // TILE
        first_tile = begin // period * per_period + begin % period // TILE
        end_tile = (end - 1) // period * per_period + (end - 1) % period // TILE + 1
    r, t = tl.arange(0, ROWS), tl.arange(0, TILE)
    in_tile = t // divisor if PLACED else t
    p, e, v = tl.arange(0, PAIRS_2), tl.arange(0, REST_2), tl.arange(0, VALUES_2)

    ahead, heads = r // GROUP, head * GROUP + r % GROUP
    last = true_position + ahead  # that a row sees
    first_seen = tl.maximum(last - WINDOW + 1, begin) if WINDOW > 0 else begin + 0 * ahead
    log_len = tl.load(log_lens + table_id)
    scales = scaling + tl.zeros([ROWS], tl.float32)
    if log_len > 0:
        # By the true position, wherever a range places the query.
        growth = tl.log(last.to(tl.float32) + 1.0) / log_len
        scales = scales * tl.maximum(1.0, growth)
    rows = query + (token + ahead)[:, None] * query_t + heads[:, None] * query_h
    is_row = (r < num_tokens * GROUP)[:, None]
    starts, offsets = table_id * num_starts * PAIRS + p, table_id * PAGE * PAIRS + p
    if PAIRS > 0:
        own_cos, own_sin = angles(
            start_cos, start_sin, offset_cos, offset_sin,
            starts + position // PAGE * PAIRS, offsets + position % PAGE * PAIRS, p < PAIRS,
        )  # fmt: skip
        is_pair = is_row & (p < PAIRS)[None, :]
        scale = (scales * tl.load(factors + table_id))[:, None]
        first = tl.load(rows + p[None, :], mask=is_pair, other=0.0).to(tl.float32) * scale
        second = tl.load(rows + (p + PAIRS)[None, :], mask=is_pair, other=0.0).to(tl.float32)
        second = second * scale
        if num_tokens > 1:
            # Each row by its distance to the first one, so that one angle serves all of them.
            place = table_id * TILE_ANGLES * PAIRS + ahead[:, None] * PAIRS + p[None, :]
            cos = tl.load(tile_cos + place, mask=is_pair, other=0.0)
            sin = tl.load(tile_sin + place, mask=is_pair, other=0.0)
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
        if CODED:
            at_pair = key_scales + head * (2 * PAIRS + REST) + p
            pair_scale = tl.load(at_pair, mask=p < PAIRS, other=0.0)
            first = bounded(first * pair_scale[None, :], _MOST_QUERY)
            second = bounded(second * pair_scale[None, :], _MOST_QUERY)
    if REST > 0:
        is_rest = is_row & (e < REST)[None, :]
        rest = tl.load(rows + (e + 2 * PAIRS)[None, :], mask=is_rest, other=0.0)
        rest = rest.to(tl.float32) * scales[:, None]
        if CODED:
            at_rest = key_scales + head * (2 * PAIRS + REST) + 2 * PAIRS + e
            rest_scale = tl.load(at_rest, mask=e < REST, other=0.0)
            rest = bounded(rest * rest_scale[None, :], _MOST_QUERY)
        rest = rest.to(kind)

    table = page_table + sequence * table_width
    row_max = tl.full([ROWS], _LEAST_SCORE, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES_2], tl.float32)
    for tile in range(first_tile, end_tile):
        start, stop = tile * TILE, end
        at = start  # the position of the tile's first key
        if PLACED:
            nth = tile // per_period
            start = nth * period + (tile - nth * per_period) * TILE
            stop = tl.minimum(end, (nth + 1) * period)
            at = (start - nth * modulus) // divisor
        # An index outside the piece loads a key of the piece again, with a probability of zero.
        # Loads without masks are cheaper, and memory that may hold NaN is never read.
        index = tl.minimum(tl.maximum(start + t, begin), stop - 1)
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
            is_angle = (p < PAIRS)[None, :]
            place = key[:, None] + p[None, :] * KEY_D
            one = row(place, is_angle, PAIRS == PAIRS_2).to(angle_kind)
            two = row(place + PAIRS * KEY_D, is_angle, PAIRS == PAIRS_2).to(angle_kind)
            back_cos, back_sin = angles(
                start_cos, start_sin, offset_cos, offset_sin,
                starts + at // PAGE * PAIRS, offsets + at % PAGE * PAIRS, p < PAIRS,
            )  # fmt: skip
            cos = own_cos * back_cos + own_sin * back_sin
            sin = own_sin * back_cos - own_cos * back_sin
            first_rotated = (first * cos - second * sin).to(kind)
            second_rotated = (second * cos + first * sin).to(kind)
            place = table_id * TILE_ANGLES * PAIRS + in_tile[:, None] * PAIRS + p[None, :]
            cos = row(tile_cos + place, is_angle, PAIRS == PAIRS_2).to(angle_kind)
            sin = row(tile_sin + place, is_angle, PAIRS == PAIRS_2).to(angle_kind)
            rotated = (one * cos - two * sin).to(kind)
            scores = product(first_rotated, tl.trans(rotated), scores, WIDE)
            rotated = (two * cos + one * sin).to(kind)
            scores = product(second_rotated, tl.trans(rotated), scores, WIDE)
        if REST > 0:
            place = key[:, None] + (e + 2 * PAIRS)[None, :] * KEY_D
            plain = row(place, (e < REST)[None, :], REST == REST_2).to(kind)
            scores = product(rest, tl.trans(plain), scores, WIDE)
        if CAPPED:
            scores = capped(scores, softcap)
        is_seen = (start + t)[None, :] < tl.minimum(last + 1, stop)[:, None]
        if PLACED or WINDOW > 0:  # other pieces begin with a tile
            is_seen = is_seen & ((start + t)[None, :] >= first_seen[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # The row sum adds the rounded probabilities, because the product uses the rounded ones.
        probs = tl.exp2(scores - new_max[:, None]).to(kind)
        keep = tl.exp2(row_max - new_max)
        row_sum = row_sum * keep + tl.sum(probs.to(tl.float32), 1)
        row_max = new_max
        place = values + page * VALUE_N + (head * VALUE_K + offset * VALUE_O)
        place = place[:, None] + v[None, :] * VALUE_V
        value = row(place, (v < VALUES)[None, :], VALUES == VALUES_2).to(kind)
        acc = product(probs, value, acc * keep[:, None], WIDE)

    row_sum = tl.where(row_sum == 0, 1.0, row_sum)  # of a row that sees no key of the piece
    acc = acc / row_sum[:, None]
    if CODED:
        value_scale = tl.load(value_scales + head * VALUES + v, mask=v < VALUES, other=0.0)
        acc = acc * value_scale[None, :]
    is_value = is_row & (v < VALUES)[None, :]
    if SUNK or num_pieces > 1:
        line = (slot + ahead * num_pieces).to(tl.int64) * tl.num_programs(0) * GROUP + heads
        tl.store(partials + line[:, None] * VALUES + v[None, :], acc, mask=is_value)
        lse = (row_max + tl.log2(row_sum)) * KERNEL_LN_2
        tl.store(lses + line, lse, mask=r < num_tokens * GROUP)
    else:
        target = out + (token + ahead)[:, None] * out_t + heads[:, None] * out_h + v[None, :]
        tl.store(target, acc, mask=is_value)


@jit("sequences", "query_start", "pieces")
def _merge(
    partials, lses, sinks, sequences, query_start, pieces, out, out_t, out_h,
    VALUES: tl.constexpr, VALUES_2: tl.constexpr, PIECES: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """One sequence and query head: its pieces weighted by their log-sum-exp, with the sink's."""
    sequence, head = tl.load(sequences + tl.program_id(0)), tl.program_id(1)
    first = tl.load(pieces + 2 * sequence)
    num_pieces = tl.load(pieces + 2 * sequence + 1)
    if num_pieces == 0:
        return  # padding of a captured step
    if not SUNK and num_pieces == 1:
        return  # the piece's program has written the output
    token = tl.load(query_start + sequence)
    num_heads = tl.num_programs(1)
    lines = first.to(tl.int64) * num_heads + head
    v, m = tl.arange(0, VALUES_2), tl.arange(0, PIECES)
    none = float("-inf")
    every = tl.load(lses + lines + m * num_heads, mask=m < num_pieces, other=none)
    lse_max = tl.max(every, 0)
    if SUNK:
        sink = tl.load(sinks + head).to(tl.float32)
        lse_max = tl.maximum(lse_max, sink)
    lse_max = tl.where(lse_max == none, 0.0, lse_max)
    weight = tl.sum(tl.exp(every - lse_max), 0)
    if SUNK:
        weight += tl.exp(sink - lse_max)
    acc = tl.zeros([VALUES_2], tl.float32)
    for at in range(0, num_pieces, _MERGE):
        i = at + tl.arange(0, _MERGE)
        is_piece = i < num_pieces
        line = lines + i * num_heads
        some = tl.exp(tl.load(lses + line, mask=is_piece, other=none) - lse_max)
        part = tl.load(
            partials + line[:, None] * VALUES + v[None, :],
            mask=is_piece[:, None] & (v < VALUES)[None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(some[:, None] * part, 0)
    acc = acc / tl.where(weight > 0, weight, 1.0)
    tl.store(out + token * out_t + head * out_h + v, acc, mask=v < VALUES)


def cut_of(read: LayerRead, tuning: Tuning) -> Cut:
    """Return how a layer cuts the contexts of its step."""
    num_processors = card_of(read.query_THD.device).num_processors
    num_programs = num_processors * tuning.programs_per_processor
    num_places = max(1, num_programs // read.keys_NKDO.shape[1])
    sizes, has_methods = sizes_of(read), bool(read.tables.positions)
    return Cut(read.sliding_window, sizes.tile, num_places, sizes.most_tokens, has_methods)


def decode(
    read: LayerRead,
    batch: Batch,
    work: WorkList,
    out_THV: Tensor,
    tuning: Tuning,
) -> None:
    """Write the rows of the batch's single query tokens to `out_THV`; no other row is changed.

    `work`: the contexts, cut as `cut_of` says with this tuning.
    """
    _, num_heads, dim = read.query_THD.shape
    num_slots, value_dim = work.num_slots, out_THV.shape[2]
    partials_LHV = torch.empty(num_slots, num_heads, value_dim, device=out_THV.device)
    lses_LH = torch.empty(num_slots, num_heads, device=out_THV.device)
    num_key_heads, _, page_size = read.keys_NKDO.shape[1:]
    group, pairs = num_heads // num_key_heads, read.tables.num_pairs
    query_THD = read.query_THD if read.query_THD.stride(-1) == 1 else read.query_THD.contiguous()
    rest = dim - 2 * pairs
    softcap = read.softcap or 0.0
    # Key heads first: the entries are in falling order, and so are then all programs.
    _decode[(num_key_heads, len(work.entries_EF))](
        query_THD, read.keys_NKDO, read.values_NKOV, batch.page_table_SN, work.entries_EF,
        work.pieces_S2, batch.cu_seqlens_S1, batch.table_id_S, batch.first_position_S,
        *read.tables.device_tensors,
        out_THV, partials_LHV, lses_LH, *scale_tensors(read.scales, lses_LH),
        read.scaling * (1.0 if softcap else LOG2_E), softcap,
        read.tables.starts.cos.shape[1], batch.page_table_SN.shape[1],
        *query_THD.stride()[:2], *out_THV.stride()[:2],
        *key_strides(read.keys_NKDO), *read.values_NKOV.stride(),
        GROUP=group, PAIRS=pairs, REST=rest, VALUES=value_dim, PAGE=page_size,
        ROWS=padded(group), PAIRS_2=padded(pairs), REST_2=padded(rest), VALUES_2=padded(value_dim),
        TILE=work.tile, TILE_ANGLES=TILE,
        FIELDS=work.entries_EF.shape[1], PLACED=bool(work.methods),
        WINDOW=read.sliding_window or 0,
        CAPPED=softcap > 0, SUNK=read.sinks_H is not None,
        WIDE=is_interpreted() and read.keys_NKDO.dtype == torch.bfloat16,
        CODED=read.scales is not None,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    sinks_H = read.sinks_H
    _merge[(len(batch.single_B), num_heads)](
        partials_LHV, lses_LH, lses_LH if sinks_H is None else sinks_H,
        batch.single_B, batch.cu_seqlens_S1, work.pieces_S2, out_THV, *out_THV.stride()[:2],
        VALUES=value_dim, VALUES_2=padded(value_dim), PIECES=padded(work.most_pieces),
        SUNK=sinks_H is not None,
    )  # fmt: skip
