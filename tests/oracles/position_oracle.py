"""Position methods by their published distances, in float64, and without ranges.

Each formula gives the distance at which query p sees key n, or None if it does not see it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Distance = Callable[[int, int], int | None]


def native(p: int, n: int) -> int:
    """The true distance."""
    return p - n


def rerope(window: int) -> Distance:
    """Su, kexue.fm/archives/9708: min(p - n, w)."""
    return lambda p, n: min(p - n, window)


def self_extend(window: int, group: int) -> Distance:
    """arXiv 2401.01325, section 3: grouped distances behind the neighbours."""

    def distance(p: int, n: int) -> int:
        if p - n < window:
            return p - n
        return p // group + window - window // group - n // group

    return distance


def string(shift: int, window: int) -> Distance:
    """arXiv 2410.18745: the diagonals from S on are shifted by S - W."""
    return lambda p, n: p - n if p - n < shift else p - n - shift + window


def sinks(num_sinks: int, window: int) -> Distance:
    """arXiv 2309.17453: positions are those in a cache of s sinks and r recent tokens."""

    def distance(p: int, n: int) -> int | None:
        kept = [*range(min(num_sinks, p + 1)), *range(max(num_sinks, p - window + 1), p + 1)]
        return None if n not in kept else len(kept) - 1 - kept.index(n)

    return distance


def dual_chunk(chunk: int, most: int) -> Distance:
    """ChunkLlama's code: keys at n mod M; the query by the distance in chunks."""

    def distance(p: int, n: int) -> int:
        chunks_back = p // chunk - n // chunk
        if chunks_back == 0:
            query = p % chunk
        elif chunks_back == 1:
            query = min(p % chunk + chunk, most)
        else:
            query = min(2 * chunk - 1, most)
        return query - n % chunk

    return distance


@dataclass(frozen=True)
class OracleLayer:
    """The features of a layer, for the oracle."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    logn_len: int | None = None
    attention_factor: float = 1.0


def attention_row(  # noqa: PLR0917
    query_HD: Tensor,
    key_CKD: Tensor,
    value_CKV: Tensor,
    inv_freq_P: Tensor,
    distance: Distance,
    layer: OracleLayer,
) -> Tensor:
    """The attention of the last position's query, from an explicit row of distances, [H, V]."""
    p = len(key_CKD) - 1
    row = [distance(p, n) for n in range(p + 1)]
    seen = [n for n, each in enumerate(row) if each is not None]
    if layer.window is not None:
        seen = [n for n in seen if p - n < layer.window]
    angle_CP = torch.tensor([float(row[n] or 0) for n in seen], dtype=torch.float64)[:, None]
    angle_CP = angle_CP * inv_freq_P.double()
    group = query_HD.shape[0] // key_CKD.shape[1]
    keys_CHD = key_CKD[seen].double().repeat_interleave(group, 1)
    values_CHV = value_CKV[seen].double().repeat_interleave(group, 1)
    pairs = len(inv_freq_P)
    first_HP, second_HP, rest_HE = query_HD.double().split(
        [pairs, pairs, query_HD.shape[-1] - 2 * pairs], -1
    )
    cos_C1P, sin_C1P = angle_CP.cos()[:, None], angle_CP.sin()[:, None]
    turned_CHP = first_HP * cos_C1P - second_HP * sin_C1P
    turned2_CHP = second_HP * cos_C1P + first_HP * sin_C1P
    logits_CH = (turned_CHP * keys_CHD[..., :pairs]).sum(-1)
    logits_CH = logits_CH + (turned2_CHP * keys_CHD[..., pairs : 2 * pairs]).sum(-1)
    logits_CH = logits_CH * layer.attention_factor**2
    logits_CH = logits_CH + (rest_HE * keys_CHD[..., 2 * pairs :]).sum(-1)
    if layer.logn_len is not None:
        logits_CH = logits_CH * max(1.0, math.log(p + 1) / math.log(layer.logn_len))
    logits_CH = logits_CH * layer.scaling
    if layer.softcap is not None:
        logits_CH = layer.softcap * torch.tanh(logits_CH / layer.softcap)
    weights_CH = logits_CH.exp()
    total_H = weights_CH.sum(0)
    if layer.sinks_H is not None:
        total_H = total_H + layer.sinks_H.double().exp()
    return torch.einsum("ch,chv->hv", weights_CH / total_H, values_CHV)
