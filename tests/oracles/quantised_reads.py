"""Reads of a cache of quantised pages, step by step, and their answers in float64."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.quantised.cache import QuantisedCache
from ropewalk.model_runtime.attention.quantised.page_format import FORMATS
from ropewalk.rope import DualChunk, PositionMethod, ReRope, SelfExtend, Shifted, Sinks
from tests.oracles import position_oracle as oracle
from tests.oracles.quantised_reference import BITS, SMALL_GROUPS, quantised_pages, record
from tests.oracles.range_cases import DIM, KEY_HEADS, PlacedReads

PAGE = 32
# Values of tiny models have two groups where large ones have more.
FORMS = {kind: replace(FORMATS[kind], group=SMALL_GROUPS.get(kind)) for kind in FORMATS}
METHODS: dict[str, tuple[PositionMethod, oracle.Distance]] = {
    "rerope": (ReRope(40), oracle.rerope(40)),
    "self_extend": (SelfExtend(12, 4), oracle.self_extend(12, 4)),
    "string": (Shifted(50, 5), oracle.string(50, 5)),
    "sinks": (Sinks(3, 70), oracle.sinks(3, 70)),
    "dual_chunk": (DualChunk(48, 16), oracle.dual_chunk(32, 48)),
}


def use_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve the formats of tiny models."""
    for kind, form in FORMS.items():
        monkeypatch.setitem(FORMATS, kind, form)


class Shape:
    """A layer."""

    num_key_heads = KEY_HEADS

    def __init__(self, key_dim: int = DIM, value_dim: int = DIM) -> None:
        self.key_dim, self.value_dim = key_dim, value_dim


class Laid(PlacedReads):
    """The reads of `PlacedReads` over quantised pages; a row's second half does not rotate."""

    backend: Any = None  # None: that of the store

    def __init__(self, kind: str, method: PositionMethod, **options: Any) -> None:
        super().__init__(method, page=PAGE, **options)
        self.kind = kind
        with patch.dict(FORMATS, FORMS):
            self.store = QuantisedCache(
                CacheLayout({0: Shape()}, self.dtype, PAGE, kind),
                len(self.keys),
                num_tails=len(self.spans),
            )
        for tensor in self.store.pages(0):
            tensor.view(torch.uint8).fill_(0xFF)  # NaN where nothing was written
        self.spans = [span._replace(tail_page=at) for at, span in enumerate(self.spans)]

    def chunk(self, index: int, first: int, end: int) -> Span:
        """The positions of a sequence from `first` up to `end`."""
        return self.spans[index]._replace(token_ids=[0] * (end - first), first_position=first)

    def step(self, spans: list[Span], query: Tensor, **options: Any) -> Tensor:
        """Write the keys and values of a step, and return its attention."""
        attention = self.write(spans)
        arguments = {
            "scaling": DIM**-0.5,
            "sliding_window": None,
            "softcap": None,
            "sinks_H": None,
            **options,
        }
        if arguments["sinks_H"] is not None:
            arguments["sinks_H"] = arguments["sinks_H"].to(self.device)
        pair = self.store.pages(0)
        found: Tensor = attention.read(
            LayerRead(query.to(self.device), *pair, self.tables, **arguments)
        )
        return found

    def write(self, spans: list[Span]) -> Any:
        """Write the keys and values of a step, and return its backend."""
        batch = self.store.with_own_pages(build_batch(spans, PAGE, self.device), spans)
        attention = (self.backend or self.store.own_backend())(batch)
        pages, offsets = batch.page_T.cpu(), batch.offset_T.cpu()
        key_TKD = self.keys[pages, :, :, offsets].to(self.device)
        value_TKV = self.values[pages, :, offsets].to(self.device)
        attention.write(*self.store.pages(0), key_TKD, value_TKV)
        return attention

    def run(self, **options: Any) -> Tensor:
        """Write what comes before the queries, then read in one step."""
        for index, (context, queries) in enumerate(self.contexts):
            if context > queries:
                self.write([self.chunk(index, 0, context - queries)])
        return self.step(self.spans, self.query, **options)

    def quantise(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each sequence as they are read when quantised, float64 [C, K, X]."""
        found = []
        for span in self.spans:
            keys = self.keys[span.pages].permute(0, 3, 1, 2).flatten(0, 1)
            values = self.values[span.pages].transpose(1, 2).flatten(0, 1)
            bits = BITS[self.kind]
            found.append((
                quantised_pages(keys, PAGE, bits[0], by_channel=True),
                quantised_pages(
                    values, PAGE, bits[1], by_channel=False, group=SMALL_GROUPS.get(self.kind)
                ),
            ))  # fmt: skip
        return found

    def expected(self, distance: oracle.Distance, **options: Any) -> Tensor:
        """The same reads in float64, each row over its own page and quantised ones before it."""
        rows = []
        whole = self.keys, self.values
        old = self.quantise()
        inv_freq_P = self.profile.scaling.frequencies(self.native.rotary).inv_freq_P
        token = 0
        for index, ((context, queries), span) in enumerate(
            zip(self.contexts, self.spans, strict=True)
        ):
            is_native = index % 2 == 1
            layer = self.layer(options, is_native=is_native)
            keys = whole[0][span.pages].permute(0, 3, 1, 2).flatten(0, 1).double()
            values = whole[1][span.pages].transpose(1, 2).flatten(0, 1).double()
            for p in range(context - queries, context):
                own = p // PAGE * PAGE
                seen = [
                    torch.cat((before[:own], exact[own : p + 1]))
                    for before, exact in zip(old[index], (keys, values), strict=True)
                ]
                at = oracle.native if is_native else distance
                rows.append(oracle.attention_row(self.query[token], *seen, inv_freq_P, at, layer))
                token += 1
        return torch.stack(rows)


def edge_page(dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys and values of a page with constants, zeros, tiny and huge numbers.

    And with a bias, outliers, infinity and NaN.
    """
    torch.manual_seed(1)
    key_TKD = torch.randn(PAGE, KEY_HEADS, dim)
    value_TKV = torch.randn(PAGE, KEY_HEADS, value_dim)
    edges = [0.0, -0.0, 1.0, 1e-40, 3e-6, 2.0**-14, 1e5, -1e5, 65519.0, 3e38, 93.0, -93.03, -3e-6]
    for at, number in enumerate(edges):
        key_TKD[:, 0, at] = number
        key_TKD[at, 1, at] = number  # an outlier
        value_TKV[at, 0] = number
    key_TKD[:, 0, 14] += 1e4
    key_TKD[5, 0, 15], value_TKV[30, 0, 3] = torch.inf, torch.nan
    key_TKD[:, 0, 16] *= 1e-5
    key_TKD[:, 0, 17] += 92.8
    return key_TKD.to(dtype), value_TKV.to(dtype)


def records_of(key_TKD: Tensor, value_TKV: Tensor, kind: str, group: int) -> list[bytes]:
    """The record of each head of a page, by its definition."""
    return [
        record(
            key_TKD[:, head].T.float().numpy(),
            value_TKV[:, head].float().numpy().reshape(-1, group),
            kind,
        )
        for head in range(KEY_HEADS)
    ]
