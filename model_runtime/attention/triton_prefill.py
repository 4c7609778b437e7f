"""The GPU's read for many query tokens of one sequence.

The sequence's keys are gathered from their pages and rotated once. Then torch's attention reads
them. If a layer has a sliding window, a soft cap or sinks, a kernel of our own reads them instead,
because torch's attention lacks these.

Shapes: T = query tokens of one sequence, C = the keys they see, H = query heads, K = key heads,
D = key dimensions, V = value dimensions, N = pages, P = rotated pairs.
"""

from functools import cache

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from model_runtime.attention.paged_attention import LayerRead
from model_runtime.attention.triton_pieces import (
    KERNEL_LOG2_E,
    LOG2_E,
    angles,
    capped,
    is_interpreted,
    jit,
    key_strides,
    padded,
    product,
    tile_len,
)
from model_runtime.batch import Batch, Place
from rope import rotate

_TILE = 64  # max number of keys, and of query tokens, that a program holds at once
_LIBRARY_DIM = 256  # max head dimension of torch's flash attention
_WARPS, _STAGES = 4, 2


@jit("page_table", "begin", "end", "table_id", "num_starts")
def _gather(
    keys, values, page_table, rotated, gathered,
    start_cos, start_sin, offset_cos, offset_sin,
    begin, end, table_id, num_starts,
    KEY_N: tl.constexpr, KEY_K: tl.constexpr, KEY_O: tl.constexpr, KEY_D: tl.constexpr,
    VALUE_N: tl.constexpr, VALUE_K: tl.constexpr, VALUE_O: tl.constexpr, VALUE_V: tl.constexpr,
    PAIRS: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, PAIRS_2: tl.constexpr, REST_2: tl.constexpr, VALUES_2: tl.constexpr,
):  # fmt: skip
    """A tile of one key head: keys rotated to their absolute positions, values unchanged."""
    head = tl.program_id(1)
    index = begin + tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_key = index < end
    page = tl.load(page_table + index // PAGE, mask=is_key, other=0).to(tl.int64)
    row = head.to(tl.int64) * (end - begin) + index - begin
    source = keys + page * KEY_N + (head * KEY_K + index % PAGE * KEY_O)
    target = rotated + row * DIM
    if PAIRS > 0:
        p = tl.arange(0, PAIRS_2)
        is_pair = is_key[:, None] & (p < PAIRS)[None, :]
        cos, sin = angles(
            start_cos, start_sin, offset_cos, offset_sin,
            table_id * num_starts * PAIRS + (index // PAGE * PAIRS)[:, None] + p[None, :],
            table_id * PAGE * PAIRS + (index % PAGE * PAIRS)[:, None] + p[None, :], is_pair,
        )  # fmt: skip
        one = tl.load(source[:, None] + p[None, :] * KEY_D, mask=is_pair, other=0.0)
        two = tl.load(source[:, None] + (p + PAIRS)[None, :] * KEY_D, mask=is_pair, other=0.0)
        one, two = one.to(tl.float32), two.to(tl.float32)
        tl.store(target[:, None] + p[None, :], one * cos - two * sin, mask=is_pair)
        tl.store(target[:, None] + (p + PAIRS)[None, :], two * cos + one * sin, mask=is_pair)
    if DIM > 2 * PAIRS:
        e = 2 * PAIRS + tl.arange(0, REST_2)
        is_rest = is_key[:, None] & (e < DIM)[None, :]
        rest = tl.load(source[:, None] + e[None, :] * KEY_D, mask=is_rest, other=0.0)
        tl.store(target[:, None] + e[None, :], rest, mask=is_rest)
    v = tl.arange(0, VALUES_2)
    is_value = is_key[:, None] & (v < VALUES)[None, :]
    place = values + page * VALUE_N + (head * VALUE_K + index % PAGE * VALUE_O)
    value = tl.load(place[:, None] + v[None, :] * VALUE_V, mask=is_value, other=0.0)
    tl.store(gathered + row[:, None] * VALUES + v[None, :], value, mask=is_value)


@jit("num_tokens", "num_keys")
def _attend(
    query, keys, values, sinks, out,
    num_tokens, num_keys, scaling, softcap, window, out_t, out_h,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
    DIM_2: tl.constexpr, VALUES_2: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile of query tokens under one head. The last token sees all keys up to the last."""
    head = tl.program_id(1)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d, v = tl.arange(0, DIM_2), tl.arange(0, VALUES_2)
    is_token = token < num_tokens
    rows = head.to(tl.int64) * num_tokens + token
    queries = tl.load(
        query + rows[:, None] * DIM + d[None, :],
        mask=is_token[:, None] & (d < DIM)[None, :], other=0.0,
    )  # fmt: skip
    own = num_keys - num_tokens + token  # the key at the token's own position
    row_max = tl.full([TILE], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE], tl.float32)
    if SUNK:
        # A sink is an extra logit without a value.
        sink = tl.load(sinks + head).to(tl.float32)
        row_max = tl.zeros([TILE], tl.float32) + sink * KERNEL_LOG2_E
        row_sum = row_sum + 1.0
    acc = tl.zeros([TILE, VALUES_2], tl.float32)
    least = num_keys - num_tokens + tl.program_id(0) * TILE
    begin = tl.maximum(0, least - window + 1) // TILE if WINDOWED else 0
    end = (tl.minimum(num_keys, least + TILE) + TILE - 1) // TILE
    head_row = (head // GROUP).to(tl.int64) * num_keys
    for tile in range(begin, end):
        index = tile * TILE + tl.arange(0, TILE)
        is_key = index < num_keys
        key = tl.load(
            keys + (head_row + index)[:, None] * DIM + d[None, :],
            mask=is_key[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.zeros([TILE, TILE], tl.float32)
        scores = product(queries, tl.trans(key), scores, WIDE) * scaling
        if CAPPED:
            scores = capped(scores, softcap)
        is_seen = index[None, :] <= own[:, None]
        if WINDOWED:
            is_seen = is_seen & (index[None, :] > own[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row has seen no key yet if its window begins after this tile.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        # The row sum adds the rounded probabilities, because the product uses the rounded ones.
        probs = tl.exp2(scores - finite_max[:, None]).to(values.dtype.element_ty)
        keep = tl.exp2(row_max - finite_max)
        row_sum = row_sum * keep + tl.sum(probs.to(tl.float32), 1)
        row_max = new_max
        value = tl.load(
            values + (head_row + index)[:, None] * VALUES + v[None, :],
            mask=is_key[:, None] & (v < VALUES)[None, :], other=0.0,
        )  # fmt: skip
        acc = product(probs, value, acc * keep[:, None], WIDE)
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # rows after the last token: 0
    target = out + token.to(tl.int64)[:, None] * out_t + head * out_h + v[None, :]
    tl.store(target, acc, mask=is_token[:, None] & (v < VALUES)[None, :])


def prefill(read: LayerRead, batch: Batch, index: int, out_THV: Tensor) -> None:
    """Write the output rows of the batch's sequence `index` to `out_THV`."""
    place = batch.places_S[index]
    end = place.first_position + place.num_tokens
    begin = max(0, place.first_position - read.sliding_window + 1) if read.sliding_window else 0
    key_KCD, value_KCV = gathered(read, batch.page_table_SN[index], place.table_id, begin, end)
    query_HTD = _rotated_queries(read, place).to(key_KCD.dtype).transpose(0, 1).contiguous()
    rows_THV = out_THV[place.begin : place.begin + place.num_tokens]
    if _library_serves(read):
        num_heads, num_key_heads = len(query_HTD), len(key_KCD)
        answer_1HTV = scaled_dot_product_attention(
            query_HTD[None],
            key_KCD[None],
            value_KCV[None],
            attn_mask=causal_lower_right(place.num_tokens, end - begin),
            scale=read.scaling,
            enable_gqa=num_heads != num_key_heads,
        )
        rows_THV.copy_(answer_1HTV[0].transpose(0, 1))
    else:
        _launch(read, query_HTD, key_KCD, value_KCV, rows_THV)


def _library_serves(read: LayerRead) -> bool:
    """Return whether torch's attention can compute this layer without a mask in memory."""
    dim, value_dim = read.query_THD.shape[-1], read.values_NKOV.shape[-1]
    return (
        not read.sliding_window
        and not read.softcap
        and read.sinks_H is None
        and read.keys_NKDO.dtype in {torch.bfloat16, torch.float16}
        and dim == value_dim
        and dim <= _LIBRARY_DIM
        and _has_flash(read.query_THD.device)
    )


@cache
def _has_flash(device: torch.device) -> bool:
    """Return whether torch's flash attention runs on the device; its fallback makes a mask."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def gathered(
    read: LayerRead, page_table_N: Tensor, table_id: int, begin: int, end: int
) -> tuple[Tensor, Tensor]:
    """Gather a sequence's rotated keys at positions begin ... end - 1, and its values.

    Keys are [K, C, D], values [K, C, V]. The keys are without the attention factor, because the
    query includes it for both.
    """
    num_heads, dim, page_size = read.keys_NKDO.shape[1:]
    value_dim = read.values_NKOV.shape[-1]
    pairs = read.tables.num_pairs
    key_KCD = read.keys_NKDO.new_empty(num_heads, end - begin, dim)
    value_KCV = read.values_NKOV.new_empty(num_heads, end - begin, value_dim)
    tile = tile_len(_TILE, max(dim, value_dim), key_KCD.dtype)
    _gather[(-(-(end - begin) // tile), num_heads)](
        read.keys_NKDO, read.values_NKOV, page_table_N, key_KCD, value_KCV,
        *read.tables.device_tensors.pages,
        begin, end, table_id, read.tables.starts.cos.shape[1],
        *key_strides(read.keys_NKDO), *read.values_NKOV.stride(),
        PAIRS=pairs, DIM=dim, VALUES=value_dim, PAGE=page_size, TILE=tile,
        PAIRS_2=padded(pairs), REST_2=padded(dim - 2 * pairs), VALUES_2=padded(value_dim),
        num_warps=_WARPS,
    )  # fmt: skip
    return key_KCD, value_KCV


def _rotated_queries(read: LayerRead, place: Place) -> Tensor:
    """Rotate the sequence's queries to their positions, and apply all factors except `scaling`."""
    tables, table_id = read.tables, place.table_id
    query_THD = read.query_THD[place.begin : place.begin + place.num_tokens]
    first = place.first_position
    positions_T = torch.arange(first, first + place.num_tokens, device=query_THD.device)
    rotated_THD = rotate(query_THD.float(), tables.at(table_id, positions_T))
    rotated_THD[..., : 2 * tables.num_pairs] *= tables.attention_factor[table_id] ** 2
    return rotated_THD * tables.logn_scale(table_id, positions_T)[:, None, None]


def _launch(
    read: LayerRead, query_HTD: Tensor, key_KCD: Tensor, value_KCV: Tensor, out_THV: Tensor
) -> None:
    num_heads, num_tokens, dim = query_HTD.shape
    num_key_heads, num_keys, value_dim = value_KCV.shape
    softcap = read.softcap or 0.0
    tile = tile_len(_TILE, max(dim, value_dim), query_HTD.dtype)
    _attend[(-(-num_tokens // tile), num_heads)](
        query_HTD, key_KCD, value_KCV, query_HTD if read.sinks_H is None else read.sinks_H,
        out_THV, num_tokens, num_keys, read.scaling * (1.0 if softcap else LOG2_E), softcap,
        read.sliding_window or 0, *out_THV.stride()[:2],
        GROUP=num_heads // num_key_heads, DIM=dim, VALUES=value_dim, TILE=tile,
        DIM_2=padded(dim), VALUES_2=padded(value_dim),
        WINDOWED=bool(read.sliding_window), CAPPED=softcap > 0, SUNK=read.sinks_H is not None,
        WIDE=is_interpreted() and query_HTD.dtype == torch.bfloat16,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
