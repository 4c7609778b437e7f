"""The compiled kernel against the torch reference, and both against float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Span, build_batch
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import LayerTables, RopeTables
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.cpu_kernels.attention import attention_dot
from ropewalk.rope import Linear, Profile, Unscaled, Yarn, native_rope

HEADS, KEY_HEADS, DIM = 6, 2, 24
YARN = Yarn(factor=4.0, original_max_position_embeddings=64)
CPU = torch.device("cpu")


class Case:
    """Sequences at different lengths and profiles over shuffled pages."""

    def __init__(
        self, share: float = 1.0, page_size: int = 16, dtype: torch.dtype = torch.float32
    ) -> None:
        config = {"max_position_embeddings": 64, "head_dim": DIM, "partial_rotary_factor": share}
        self.native = native_rope(config)
        self.profiles = [
            Profile(Unscaled()),
            Profile(YARN, logn_len=64),
            Profile(Linear(factor=3.0)),
        ]
        self.page_size = page_size
        self.contexts = [(1, 1), (200, 1), (70, 33), (129, 129)]  # (context, queries)
        tables = RopeTables(self.native, page_size, 256, CPU)
        self.table_ids = [tables.id_of(profile) for profile in self.profiles]
        self.tables: LayerTables = tables.layer("all")
        pages = 256 // page_size
        ids = torch.randperm(len(self.contexts) * pages).tolist()
        self.spans = [
            Span(
                [0] * queries,
                context - queries,
                ids[index * pages : (index + 1) * pages],
                self.table_ids[index % 3],
                range(0),
            )
            for index, (context, queries) in enumerate(self.contexts)
        ]
        self.batch: Batch = build_batch(self.spans, page_size, CPU)
        pages = (len(ids), KEY_HEADS)
        self.keys = torch.randn(*pages, DIM, page_size).to(dtype)
        self.values = torch.randn(*pages, page_size, DIM).to(dtype)
        tokens = sum(queries for _, queries in self.contexts)
        self.query = torch.randn(tokens, HEADS, DIM).to(dtype)

    def read(self, **options: Any) -> LayerRead:
        """The read of one layer."""
        arguments = {"scaling": DIM**-0.5, "sliding_window": None, "softcap": None, "sinks_H": None}
        return LayerRead(
            self.query,
            self.keys,
            self.values,
            self.tables,
            **{**arguments, **options},
        )

    def exact(self, **options: Any) -> Tensor:
        """The same read in float64, token by token, by the textbook's formula."""
        rows = []
        token = 0
        for index, (context, queries) in enumerate(self.contexts):
            for position in range(context - queries, context):
                rows += [
                    self._row(index, position, self.query[token, head], head, options)
                    for head in range(HEADS)
                ]
                token += 1
        return torch.stack(rows).view(token, HEADS, DIM)

    def _row(self, index: int, position: int, query: Tensor, head: int, options: Any) -> Tensor:
        profile = self.profiles[index % 3]
        table = profile.scaling.frequencies(self.native.rotary)
        inv_freq = table.inv_freq_P.double()
        pairs = len(inv_freq)
        key_head = head // (HEADS // KEY_HEADS)
        query = self._turn(query.double(), position, inv_freq, table)
        if profile.logn_len is not None:
            query = query * max(1.0, math.log(position + 1) / math.log(profile.logn_len))
        window = options.get("sliding_window") or position + 1
        seen = range(max(0, position - window + 1), position + 1)
        at = [(self.spans[index].pages[n // self.page_size], n % self.page_size) for n in seen]
        keys = torch.stack(
            [
                self._turn(self.keys[page, key_head, :, o].double(), n, inv_freq, table)
                for (page, o), n in zip(at, seen, strict=True)
            ]
        )
        values = torch.stack([self.values[page, key_head, o].double() for page, o in at])
        assert keys.shape[1] >= 2 * pairs
        logits = keys @ query * DIM**-0.5
        if options.get("softcap"):
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        weights = logits.exp()
        sink = options.get("sinks_H")
        total = weights.sum() + (sink[head].double().exp() if sink is not None else 0.0)
        return weights / total @ values

    @staticmethod
    def _turn(vector: Tensor, position: int, inv_freq: Tensor, table: Any) -> Tensor:
        pairs = len(inv_freq)
        cos = (position * inv_freq).cos() * table.attention_factor
        sin = (position * inv_freq).sin() * table.attention_factor
        first, second = vector[:pairs], vector[pairs : 2 * pairs]
        return torch.cat(
            (first * cos - second * sin, second * cos + first * sin, vector[2 * pairs :])
        )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 20},
    {"softcap": 3.0},
    {"sinks_H": torch.linspace(-1, 2, HEADS)},
    {"sliding_window": 7, "softcap": 5.0, "sinks_H": torch.linspace(-1, 2, HEADS)},
]


@pytest.mark.costly
@pytest.mark.sampled(fixed=0, drawn=1)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "softcap", "sinks", "all"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_both_backends_equal_float64(options: dict[str, Any], share: float) -> None:
    """Both backends agree with float64 on a batch of mixed profiles, lengths and chunk sizes."""
    case = Case(share)
    expected = case.exact(**options)
    for backend in (TorchAttention, CpuAttention):
        got = backend(case.batch).read(case.read(**options)).double()
        assert float((got - expected).abs().max()) < 2e-5 * float(expected.abs().max())


@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_page_size_changes_nothing_but_rounding(page_size: int) -> None:
    """The kernel is compiled once for each page size; torch is the reference."""
    case = Case(page_size=page_size)
    expected = TorchAttention(case.batch).read(case.read())
    assert torch.allclose(CpuAttention(case.batch).read(case.read()), expected, atol=1e-5)


def test_bfloat16_pages_are_read_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """If products in pairs would not be faster, then bits are widened and sums are float32."""
    monkeypatch.setattr(attention_dot, "pairs_pay", lambda: False)
    case = Case(dtype=torch.bfloat16)
    expected = TorchAttention(case.batch).read(case.read())
    assert torch.allclose(CpuAttention(case.batch).read(case.read()), expected, atol=1e-5)


def test_a_layer_without_rotation_ignores_the_profile() -> None:
    """A layer without rotation turns zero pairs, so its scores are plain dot products."""
    case = Case()
    tables = RopeTables(case.native, 16, 256, CPU)
    for profile in case.profiles:
        tables.id_of(profile)
    case.tables = tables.layer(None)
    case.profiles = [Profile(Unscaled())] * 3
    got = CpuAttention(case.batch).read(case.read())
    assert torch.allclose(got, TorchAttention(case.batch).read(case.read()), atol=1e-5)

    context, span = case.contexts[1][0], case.spans[1]
    keys = case.keys[span.pages].permute(0, 3, 1, 2).flatten(0, 1)[:context, 0]
    values = case.values[span.pages].transpose(1, 2).flatten(0, 1)[:context, 0]
    plain = (keys @ case.query[1, 0] * DIM**-0.5).softmax(0) @ values
    assert torch.allclose(got[1, 0], plain, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_behind_the_last_token_is_never_read(dtype: torch.dtype) -> None:
    """NaN in all unused pages and offsets leaves every row as it was."""
    case = Case(dtype=dtype)
    clean = CpuAttention(case.batch).read(case.read())
    used = torch.zeros(case.keys.shape[0], case.page_size, dtype=torch.bool)
    for (context, _), span in zip(case.contexts, case.spans, strict=True):
        for position in range(context):
            used[span.pages[position // 16], position % 16] = True
    case.keys.permute(0, 3, 1, 2)[~used] = torch.nan
    case.values.transpose(1, 2)[~used] = torch.nan
    assert torch.equal(CpuAttention(case.batch).read(case.read()), clean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_alone_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    """A row has the same bits in any batch and on any number of threads, for promise 2."""
    case = Case(dtype=dtype)
    whole = CpuAttention(case.batch).read(case.read())
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(CpuAttention(case.batch).read(case.read()), whole)
    finally:
        torch.set_num_threads(threads)
    begin = 0
    query = case.query
    for span in case.spans:
        end = begin + len(span.token_ids)
        case.batch, case.query = build_batch([span], 16, CPU), query[begin:end]
        assert torch.equal(CpuAttention(case.batch).read(case.read()), whole[begin:end])
        begin = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_backends_write_to_the_same_places(dtype: torch.dtype) -> None:
    """Both backends write to the same places of the cache, and to no other place."""
    case = Case(dtype=dtype)
    tokens = len(case.query)
    key, value = torch.randn(2, tokens, KEY_HEADS, DIM).to(dtype)
    written = []
    for backend in (TorchAttention, CpuAttention):
        pages = torch.zeros_like(case.keys), torch.zeros_like(case.values)
        backend(case.batch).write(*pages, key, value)
        written.append(pages)
    assert torch.equal(written[0][0], written[1][0])
    assert torch.equal(written[0][1], written[1][1])
    page, offset = case.batch.page_T[5], case.batch.offset_T[5]
    assert torch.equal(written[1][0][page, :, :, offset], key[5])
    assert torch.equal(written[1][1][page, :, offset], value[5])
    assert int((written[1][0] != 0).sum()) == key.numel()
