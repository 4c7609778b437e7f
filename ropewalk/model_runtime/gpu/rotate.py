"""The prefill's kernels that rotate: the queries of all prompts, and the keys of a group.

Both write packed rows (prompt_groups.py). Queries include all factors of a logit except the layer's
scaling. Keys are gathered from their pages together with the values.

Shapes: T = packed query tokens, C = packed keys of a group, H = query heads, K = key heads,
D = key dimensions, V = value dimensions.
"""

import triton.language as tl
from torch import Tensor

from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.prompt_groups import PromptGroup, QueryRows
from ropewalk.model_runtime.gpu.launch import jit
from ropewalk.model_runtime.gpu.primitives import angles, key_strides, padded, scale_tensors

_MOST_NUMBERS = 4096  # numbers of queries that a program holds at once
_WARPS = 4


@jit("rows", "positions", "placed", "table_ids", "num_starts")
def _turn(
    query, turned, rows, positions, placed, table_ids,
    start_cos, start_sin, offset_cos, offset_sin, factors, log_lens,
    num_starts, query_t, query_h,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    HEADS_2: tl.constexpr, PAIRS_2: tl.constexpr, REST_2: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """Some heads of one query token. Positions and factors are the token's own.

    PLACED: it stands at another position. Log-n takes the true one.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64)
    if row < 0:
        return  # padding of a captured step
    position = tl.load(positions + token)
    table_id = tl.load(table_ids + token).to(tl.int64)
    log_len = tl.load(log_lens + table_id)
    is_scaled = log_len > 0
    growth = tl.log(position.to(tl.float32) + 1.0) / tl.where(is_scaled, log_len, 1.0)
    scale = tl.where(is_scaled, tl.maximum(1.0, growth), 1.0)
    h = tl.program_id(1) * HEADS_2 + tl.arange(0, HEADS_2)
    source = query + row * query_t + (h * query_h)[:, None]
    target = turned + (token.to(tl.int64) * HEADS + h)[:, None] * DIM
    is_head = (h < HEADS)[:, None]
    if PLACED:
        position = tl.load(placed + token)
    kind = turned.dtype.element_ty
    if PAIRS > 0:
        p = tl.arange(0, PAIRS_2)
        cos, sin = angles(
            start_cos, start_sin, offset_cos, offset_sin,
            (table_id * num_starts + position // PAGE) * PAIRS + p,
            (table_id * PAGE + position % PAGE) * PAIRS + p, p < PAIRS,
        )  # fmt: skip
        factor = scale * tl.load(factors + table_id)
        cos, sin = (cos * factor)[None, :], (sin * factor)[None, :]
        is_pair = is_head & (p < PAIRS)[None, :]
        p = p[None, :]
        one = tl.load(source + p, mask=is_pair, other=0.0).to(tl.float32)
        two = tl.load(source + PAIRS + p, mask=is_pair, other=0.0).to(tl.float32)
        tl.store(target + p, (one * cos - two * sin).to(kind), mask=is_pair)
        tl.store(target + PAIRS + p, (two * cos + one * sin).to(kind), mask=is_pair)
    if DIM > 2 * PAIRS:
        e = 2 * PAIRS + tl.arange(0, REST_2)[None, :]
        is_rest = is_head & (e < DIM)
        rest = tl.load(source + e, mask=is_rest, other=0.0).to(tl.float32)
        tl.store(target + e, (rest * scale).to(kind), mask=is_rest)


@jit(
    "page_table", "tiles", "cu_keys", "first_keys", "page_ats", "table_ids", "moduli", "divisors",
    "num_starts",
)  # fmt: skip
def _gather(
    keys, values, page_table, rotated, gathered, key_scales, value_scales,
    start_cos, start_sin, offset_cos, offset_sin,
    tiles, cu_keys, first_keys, page_ats, table_ids, moduli, divisors, num_starts,
    KEY_N: tl.constexpr, KEY_K: tl.constexpr, KEY_O: tl.constexpr, KEY_D: tl.constexpr,
    VALUE_N: tl.constexpr, VALUE_K: tl.constexpr, VALUE_O: tl.constexpr, VALUE_V: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
    PAIRS_2: tl.constexpr, REST_2: tl.constexpr, VALUES_2: tl.constexpr, PLACED: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """A tile of one key head: keys rotated to their absolute positions, values unchanged.

    PLACED: keys stand where the key map of their part says.
    CODED: the pages have codes of eight bits. What is gathered is codes times their scales.
    """
    head = tl.program_id(1)
    prompt = tl.load(tiles + 2 * tl.program_id(0))
    if prompt < 0:
        return  # padding of a captured step
    place = tl.load(tiles + 2 * tl.program_id(0) + 1) + tl.arange(0, TILE)
    first_row = tl.load(cu_keys + prompt)
    is_key = place < tl.load(cu_keys + prompt + 1) - first_row
    table_id = tl.load(table_ids + prompt).to(tl.int64)
    index = tl.load(first_keys + prompt) + place
    position = index
    if PLACED:
        position = index % tl.load(moduli + prompt) // tl.load(divisors + prompt)
    page = tl.load(page_table + tl.load(page_ats + prompt) + index // PAGE, mask=is_key, other=0)
    page = page.to(tl.int64)
    row = (first_row + place).to(tl.int64) * HEADS + head
    source = keys + page * KEY_N + (head * KEY_K + index % PAGE * KEY_O)
    target = rotated + row * DIM
    if PAIRS > 0:
        p = tl.arange(0, PAIRS_2)
        is_pair = is_key[:, None] & (p < PAIRS)[None, :]
        cos, sin = angles(
            start_cos, start_sin, offset_cos, offset_sin,
            table_id * num_starts * PAIRS + (position // PAGE * PAIRS)[:, None] + p[None, :],
            table_id * PAGE * PAIRS + (position % PAGE * PAIRS)[:, None] + p[None, :], is_pair,
        )  # fmt: skip
        one = tl.load(source[:, None] + p[None, :] * KEY_D, mask=is_pair, other=0.0)
        two = tl.load(source[:, None] + (p + PAIRS)[None, :] * KEY_D, mask=is_pair, other=0.0)
        one, two = one.to(tl.float32), two.to(tl.float32)
        if CODED:
            scale = tl.load(key_scales + head * DIM + p, mask=p < PAIRS, other=0.0)[None, :]
            one, two = one * scale, two * scale
        tl.store(target[:, None] + p[None, :], one * cos - two * sin, mask=is_pair)
        tl.store(target[:, None] + (p + PAIRS)[None, :], two * cos + one * sin, mask=is_pair)
    if DIM > 2 * PAIRS:
        e = 2 * PAIRS + tl.arange(0, REST_2)
        is_rest = is_key[:, None] & (e < DIM)[None, :]
        rest = tl.load(source[:, None] + e[None, :] * KEY_D, mask=is_rest, other=0.0)
        if CODED:
            scale = tl.load(key_scales + head * DIM + e, mask=e < DIM, other=0.0)
            rest = rest.to(tl.float32) * scale[None, :]
        tl.store(target[:, None] + e[None, :], rest, mask=is_rest)
    v = tl.arange(0, VALUES_2)
    is_value = is_key[:, None] & (v < VALUES)[None, :]
    source = values + page * VALUE_N + (head * VALUE_K + index % PAGE * VALUE_O)
    value = tl.load(source[:, None] + v[None, :] * VALUE_V, mask=is_value, other=0.0)
    if CODED:
        scale = tl.load(value_scales + head * VALUES + v, mask=v < VALUES, other=0.0)
        value = value.to(tl.float32) * scale[None, :]
    tl.store(gathered + row[:, None] * VALUES + v[None, :], value, mask=is_value)


def turned(read: LayerRead, queries: QueryRows) -> Tensor:
    """Rotate the queries of all prompts to their positions, [T, H, D] in their own dtype.

    The arithmetic is float32. The attention factor is included for query and key, because keys
    are stored and gathered without it. So is the factor of the log-n switch.
    """
    _, num_heads, dim = read.query_THD.shape
    query_THD = read.query_THD if read.query_THD.stride(-1) == 1 else read.query_THD.contiguous()
    num_tokens = len(queries.row_T)
    turned_THD = query_THD.new_empty(num_tokens, num_heads, dim)
    tensors, pairs = read.tables.device_tensors, read.tables.num_pairs
    heads = heads_at_once(num_heads, dim)
    _turn[(num_tokens, -(-num_heads // heads))](
        query_THD, turned_THD, queries.row_T, queries.position_T,
        queries.position_T if queries.placed_T is None else queries.placed_T, queries.table_id_T,
        *tensors.pages, tensors.squared_factor_S, tensors.logn_S,
        read.tables.starts.cos.shape[1], *query_THD.stride()[:2],
        HEADS=num_heads, PAIRS=pairs, DIM=dim, PAGE=read.keys_NKDO.shape[-1],
        HEADS_2=heads, PAIRS_2=padded(pairs), REST_2=padded(dim - 2 * pairs),
        PLACED=queries.placed_T is not None,
        num_warps=_WARPS,
    )  # fmt: skip
    return turned_THD


def heads_at_once(num_heads: int, dim: int) -> int:
    """Return the number of heads of a token that a program holds, a power of two."""
    return min(padded(num_heads, 1), max(1, _MOST_NUMBERS // padded(dim)))


def gathered(
    read: LayerRead,
    group: PromptGroup,
    page_table_SN: Tensor,
    tile: int,
    key_maps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather the rotated keys [C, K, D] and the values [C, K, V] of a group, prompt by prompt.

    The keys are without the attention factor, because the query includes it for both.
    `key_maps`: modulus and divisor of each part; None: keys stand at their index.
    """
    num_heads, dim, page_size = read.keys_NKDO.shape[1:]
    value_dim = read.values_NKOV.shape[-1]
    pairs = read.tables.num_pairs
    key_CKD = read.query_THD.new_empty(group.num_keys, num_heads, dim)
    value_CKV = read.query_THD.new_empty(group.num_keys, num_heads, value_dim)
    _gather[(len(group.key_tiles_W2), num_heads)](
        read.keys_NKDO, read.values_NKOV, page_table_SN, key_CKD, value_CKV,
        *scale_tensors(read.scales, key_CKD),
        *read.tables.device_tensors.pages,
        group.key_tiles_W2, group.cu_keys_G1, group.first_key_G, group.page_at_G, group.table_id_G,
        *(key_maps or (group.first_key_G,) * 2), read.tables.starts.cos.shape[1],
        *key_strides(read.keys_NKDO), *read.values_NKOV.stride(),
        HEADS=num_heads, PAIRS=pairs, DIM=dim, VALUES=value_dim, PAGE=page_size, TILE=tile,
        PAIRS_2=padded(pairs), REST_2=padded(dim - 2 * pairs), VALUES_2=padded(value_dim),
        PLACED=key_maps is not None, CODED=read.scales is not None,
        num_warps=_WARPS,
    )  # fmt: skip
    return key_CKD, value_CKV
