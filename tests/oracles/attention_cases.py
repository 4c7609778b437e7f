"""Reads of a paged cache with every feature of a layer, and their answer in float64."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Span, build_batch
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import LayerTables, RopeTables
from ropewalk.rope import Linear, PositionMethod, Profile, Unscaled, Yarn, native_rope

LOGN_LEN = 64
# The tables of a batch, by turns; yarn has an attention factor of 1.14.
PROFILES = (
    Profile(Unscaled()),
    Profile(Yarn(factor=4.0, original_max_position_embeddings=64), logn_len=LOGN_LEN),
    Profile(Linear(factor=3.0)),
)
RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

# A GPU's exp2 and division are approximations, each with a relative error of up to 2**-22. So
# tanh = 1 - 2 / (exp2(x) + 1) is off by up to 2**-21, and a capped logit by as much times the cap.
# That is the relative error of its weight.
CAP_ERROR = 2**-21


@dataclass(frozen=True, kw_only=True)
class Case:
    """The parameters of a read; `spans` are context and query tokens of every sequence."""

    spans: tuple[tuple[int, int], ...] = ((1, 1), (200, 1), (70, 33), (129, 129))
    heads: tuple[int, int] = (6, 2)  # of queries, of keys
    dims: tuple[int, int] = (24, 24)  # of keys, of values
    rotary_share: float | None = 1.0  # None: a layer that does not rotate
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    row_keys: bool = True
    positions: PositionMethod | None = None  # of all tables; `expected` does not know it


@dataclass
class Laid:
    """A case on a device, with random queries, keys and values."""

    case: Case
    device: torch.device
    spans: list[Span] = field(init=False)
    batch: Batch = field(init=False)
    read: LayerRead = field(init=False)

    def __post_init__(self) -> None:
        """Shuffled pages, with NaN wherever no token of a sequence stands."""
        case = self.case
        num_heads, num_key_heads = case.heads
        dim, value_dim = case.dims
        config = {
            "max_position_embeddings": 64,
            "head_dim": dim,
            "partial_rotary_factor": case.rotary_share or 1.0,
        }
        self.native = native_rope(config)
        longest = max(context for context, _ in case.spans)
        rope_tables = RopeTables(self.native, case.page_size, longest, self.device)
        table_ids = [
            rope_tables.id_of(replace(profile, positions=case.positions)) for profile in PROFILES
        ]
        self.tables: LayerTables = rope_tables.layer(None if case.rotary_share is None else "all")
        needed = [-(-context // case.page_size) for context, _ in case.spans]
        ids = torch.randperm(sum(needed) + 3).tolist()
        spans, at = [], 0
        for index, ((context, queries), pages) in enumerate(zip(case.spans, needed, strict=True)):
            row = ids[at : at + pages]
            spans.append(
                Span([0] * queries, context - queries, row, table_ids[index % 3], range(0))
            )
            at += pages
        self.spans = spans
        self.batch = build_batch(spans, case.page_size, self.device)
        shape = _Shape(num_key_heads, dim, value_dim)
        layout = CacheLayout({0: shape}, case.dtype, case.page_size)
        store = KVCache(layout, len(ids), self.device, row_keys=case.row_keys)
        keys_NKDO, values_NKOV = store.pages(0)
        keys_NKDO.fill_(torch.nan)
        values_NKOV.fill_(torch.nan)
        self.keys, self.values = [], []  # [C, K, D] and [C, K, V] in float64, by sequence
        for (context, _), span in zip(case.spans, spans, strict=True):
            key_CKD = self._random(context, num_key_heads, dim)
            value_CKV = self._random(context, num_key_heads, value_dim)
            positions_C = torch.arange(context, device=self.device)
            pages_C = torch.tensor(span.pages, device=self.device)[positions_C // case.page_size]
            keys_NKDO[pages_C, :, :, positions_C % case.page_size] = key_CKD
            values_NKOV[pages_C, :, positions_C % case.page_size] = value_CKV
            self.keys.append(key_CKD.double().cpu())
            self.values.append(value_CKV.double().cpu())
        num_tokens = sum(queries for _, queries in case.spans)
        sinks_H = torch.linspace(-1, 2, num_heads, device=self.device)
        self.read = LayerRead(
            self._random(num_tokens, num_heads, dim),
            keys_NKDO,
            values_NKOV,
            self.tables,
            dim**-0.5,
            case.window,
            case.softcap,
            sinks_H.to(case.dtype) if case.has_sinks else None,
        )

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.device, self.case.dtype)

    def expected(self) -> Tensor:
        """The answer, float64 [T, H, V]."""
        rows = []
        for index, place in enumerate(self.batch.places_S):
            end = place.first_position + place.num_tokens
            queries_T = torch.arange(place.first_position, end)
            query_THD = self.read.query_THD[place.begin : place.begin + place.num_tokens]
            distance_TC = queries_T[:, None] - torch.arange(end)
            seen_TC = distance_TC >= 0
            if self.case.window is not None:
                seen_TC &= distance_TC < self.case.window
            logits_HTC = self.logits(index, query_THD, queries_T, torch.arange(end))
            rows.append(self.answer(index, [logits_HTC.masked_fill(~seen_TC, -torch.inf)]))
        return torch.cat(rows)

    def logits(
        self,
        index: int,
        query_THD: Tensor,
        at_T: Tensor,
        at_C: Tensor,
        true_T: Tensor | None = None,
    ) -> Tensor:
        """The logits of sequence `index`, its query and keys at these positions, [H, T, C].

        `true_T`: the true positions of a query that stands elsewhere.
        """
        query_THD, key_CKD = rotated(self, index, query_THD, at_T, at_C, true_T)
        group = query_THD.shape[1] // key_CKD.shape[1]
        key_CHD = key_CKD.repeat_interleave(group, 1)
        logits_HTC = torch.einsum("thd,chd->htc", query_THD, key_CHD) * self.read.scaling
        if self.case.softcap is not None:
            logits_HTC = self.case.softcap * torch.tanh(logits_HTC / self.case.softcap)
        return logits_HTC

    def answer(self, index: int, logits: list[Tensor]) -> Tensor:
        """The answer [T, H, V] of one or several sets of logits [H, T, C] over all of the keys."""
        weights = [logits_HTC.exp() for logits_HTC in logits]
        total_HT1 = torch.stack([weight.sum(-1, keepdim=True) for weight in weights]).sum(0)
        if self.read.sinks_H is not None:
            total_HT1 = total_HT1 + self.read.sinks_H.double().cpu().exp()[:, None, None]
        value_CKV = self.values[index]
        value_CHV = value_CKV.repeat_interleave(logits[0].shape[0] // value_CKV.shape[1], 1)
        parts = [
            torch.einsum("htc,chv->thv", weight / total_HT1, value_CHV[: weight.shape[-1]])
            for weight in weights
        ]
        return torch.stack(parts).sum(0)


def rotated(  # noqa: PLR0917
    case: Laid,
    index: int,
    query_THD: Tensor,
    at_T: Tensor,
    at_C: Tensor,
    true_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A sequence's query, with log-n, and its keys at these positions, float64."""
    profile = PROFILES[index % 3]
    query_THD = query_THD.double().cpu()
    key_CKD = case.keys[index][: len(at_C)]
    if case.case.rotary_share is not None:
        table = profile.scaling.frequencies(case.native.rotary)
        query_THD = _rotated(query_THD, at_T, table)
        key_CKD = _rotated(key_CKD, at_C, table)
        if profile.logn_len is not None:
            here_T = at_T if true_T is None else true_T
            scale_T = ((here_T + 1).double().log() / math.log(LOGN_LEN)).clamp(min=1.0)
            query_THD = query_THD * scale_T[:, None, None]
    return query_THD, key_CKD


@dataclass(frozen=True)
class _Shape:
    num_key_heads: int
    key_dim: int
    value_dim: int


def _rotated(x_THD: Tensor, at_T: Tensor, table: Any) -> Tensor:
    angle_TP = at_T.double()[:, None] * table.inv_freq_P.double()
    cos_T1P = angle_TP.cos()[:, None] * table.attention_factor
    sin_T1P = angle_TP.sin()[:, None] * table.attention_factor
    pairs = cos_T1P.shape[-1]
    first, second, rest = x_THD.split([pairs, pairs, x_THD.shape[-1] - 2 * pairs], -1)
    rotated_pairs = (first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P)
    return torch.cat((*rotated_pairs, rest), -1)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Length of the difference over the length of what was expected; NaN if anything is."""
    return float((got.double().cpu() - expected).norm() / expected.norm())


def tolerance(case: Case, device: torch.device) -> float:
    """The relative error that a read of a case may have on a device."""
    most = RELATIVE_ERROR[case.dtype]
    return most + CAP_ERROR * case.softcap if case.softcap and device.type == "cuda" else most


def cases() -> dict[str, Case]:
    """Name -> case: each feature alone and together, in every dtype where it matters."""
    bfloat16, float16 = torch.bfloat16, torch.float16
    found = {
        "plain": Case(),
        "window": Case(window=20),
        "softcap": Case(softcap=3.0),
        "sinks": Case(has_sinks=True),
        "partial rotary": Case(rotary_share=0.5),
        "no rotation": Case(rotary_share=None),
        "all": Case(window=37, softcap=5.0, has_sinks=True, rotary_share=0.5),
        "wide head": Case(dims=(128, 128), heads=(4, 1), spans=((90, 1), (40, 9))),
        "odd head": Case(dims=(80, 48), heads=(5, 5), rotary_share=0.4, spans=((90, 1), (40, 9))),
        "one head for all": Case(heads=(20, 1), spans=((150, 1), (60, 7))),
        "page of 4": Case(page_size=4),
        "page of 24": Case(page_size=24, window=50),
        "page of 256": Case(page_size=256, spans=((300, 1), (700, 1), (260, 20))),
        "keys by dimension": Case(row_keys=False, rotary_share=0.5),
        "tails": Case(spans=tuple((context, 1) for context in (1, 15, 16, 17, 63, 64, 65, 128))),
        "long": Case(spans=((3001, 1), (1, 1), (1024, 1)), heads=(4, 2)),
        "long window": Case(spans=((3001, 1), (2500, 30)), heads=(2, 1), window=700),
        "long sinks": Case(spans=((2049, 1), (5, 1)), heads=(4, 2), has_sinks=True, softcap=20.0),
        "tiny window": Case(window=1, has_sinks=True),
    }
    for name in ("plain", "all", "wide head", "odd head", "long"):
        case = vars(found[name])
        found[f"{name}, bf16"] = Case(**{**case, "dtype": bfloat16})
    found["plain, f16"] = Case(dtype=float16)
    found["no rotation, bf16"] = Case(rotary_share=None, dtype=bfloat16)
    found["sinks, f16"] = Case(has_sinks=True, dtype=float16, rotary_share=0.5)
    return found
