"""Reads of the cache under every position method, and their answers from explicit distances."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Span, build_batch
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.rope import (
    DualChunk,
    PositionMethod,
    Profile,
    ReRope,
    SelfExtend,
    Shifted,
    Sinks,
    Unscaled,
    native_rope,
)
from tests.oracles import position_oracle as oracle

HEADS, KEY_HEADS, DIM, PAGE = 6, 2, 24, 8
CPU = torch.device("cpu")
METHODS: dict[str, tuple[PositionMethod, oracle.Distance]] = {
    "rerope": (ReRope(20), oracle.rerope(20)),
    "rerope, window of whole pages": (ReRope(16), oracle.rerope(16)),
    "rerope, window of 1": (ReRope(1), oracle.rerope(1)),
    "self_extend, group in a page": (SelfExtend(12, 4), oracle.self_extend(12, 4)),
    "self_extend, group of pages": (SelfExtend(16, 16), oracle.self_extend(16, 16)),
    "self_extend, group of a page": (SelfExtend(24, 8), oracle.self_extend(24, 8)),
    "string": (Shifted(21, 5), oracle.string(21, 5)),
    "sinks": (Sinks(3, 17), oracle.sinks(3, 17)),
    "sinks, whole pages": (Sinks(8, 16), oracle.sinks(8, 16)),
    "dual_chunk": (DualChunk(32, 8), oracle.dual_chunk(24, 32)),
    "dual_chunk, one page": (DualChunk(10, 2), oracle.dual_chunk(8, 10)),
    "dual_chunk, far": (DualChunk(64, 40), oracle.dual_chunk(24, 64)),
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 30},
    "softcap": {"softcap": 3.0},
    "sink logits": {"sinks_H": torch.linspace(-1, 2, HEADS)},
    "all": {"sliding_window": 41, "softcap": 5.0, "sinks_H": torch.linspace(-1, 2, HEADS)},
}


@dataclass
class PlacedReads:
    """Sequences over shuffled pages; every second one has no method."""

    method: PositionMethod
    share: float = 1.0
    logn_len: int | None = None
    dtype: torch.dtype = torch.float32
    page: int = PAGE
    # A whole prompt, chunks that begin and end inside pages and chunks, and single tokens at the
    # first and the last place of pages, windows and chunks.
    contexts: tuple[tuple[int, int], ...] = (
        *((120, 120), (90, 33), (67, 5), (100, 40)),
        *((context, 1) for context in (1, 8, 9, 16, 17, 20, 21, 24, 25, 48, 49, 72, 73, 119)),
    )
    device: torch.device = CPU
    batch: Batch = field(init=False)

    def __post_init__(self) -> None:
        config = {
            "max_position_embeddings": 64,
            "head_dim": DIM,
            "partial_rotary_factor": self.share,
            "rope_theta": 50.0,  # every distance changes the answer
        }
        self.native = native_rope(config)
        tables = RopeTables(self.native, self.page, 256, self.device)
        self.profile = Profile(Unscaled(), self.logn_len, self.method)
        self.ids = [tables.id_of(self.profile), tables.id_of(Profile(Unscaled()))]
        self.tables = tables.layer("all")
        per = 128 // self.page
        shuffled = torch.randperm(len(self.contexts) * per).tolist()
        self.spans = [
            Span(
                [0] * queries,
                context - queries,
                shuffled[index * per : (index + 1) * per],
                self.ids[index % 2],
                range(0),
            )
            for index, (context, queries) in enumerate(self.contexts)
        ]
        self.batch = build_batch(self.spans, self.page, self.device)
        self.keys = torch.randn(len(shuffled), KEY_HEADS, DIM, self.page).to(self.dtype)
        self.values = torch.randn(len(shuffled), KEY_HEADS, self.page, DIM).to(self.dtype)
        tokens = sum(queries for _, queries in self.contexts)
        self.query = torch.randn(tokens, HEADS, DIM).to(self.dtype)

    def read(self, **options: Any) -> LayerRead:
        """The read of one layer."""
        plain = {"scaling": DIM**-0.5, "sliding_window": None, "softcap": None, "sinks_H": None}
        arguments = {**plain, **options}
        numbers = (each.to(self.device) for each in (self.query, self.keys, self.values))
        if arguments["sinks_H"] is not None:
            arguments["sinks_H"] = arguments["sinks_H"].to(self.device)
        return LayerRead(*numbers, self.tables, **arguments)

    def layer(self, options: Mapping[str, Any], *, is_native: bool) -> oracle.OracleLayer:
        """The layer of a read with these options, for a sequence under its table."""
        return oracle.OracleLayer(
            DIM**-0.5,
            options.get("sliding_window"),
            options.get("softcap"),
            options.get("sinks_H"),
            None if is_native else self.logn_len,
            1.0 if is_native else self.method.attention_factor,
        )

    def exact(self, distance: oracle.Distance, **options: Any) -> Tensor:
        """The same read in float64, from the distances."""
        inv_freq_P = Unscaled().frequencies(self.native.rotary).inv_freq_P
        rows, token = [], 0
        for index, ((context, queries), span) in enumerate(
            zip(self.contexts, self.spans, strict=True)
        ):
            is_native = index % 2 == 1
            layer = self.layer(options, is_native=is_native)
            keys = self.keys[span.pages].permute(0, 3, 1, 2).flatten(0, 1)
            values = self.values[span.pages].transpose(1, 2).flatten(0, 1)
            for p in range(context - queries, context):
                at = oracle.native if is_native else distance
                rows.append(
                    oracle.attention_row(
                        self.query[token], keys[: p + 1], values[: p + 1], inv_freq_P, at, layer
                    )
                )
                token += 1
        return torch.stack(rows)


def largest_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that was expected."""
    return float((got.double().cpu() - expected).abs().max() / expected.abs().max())
