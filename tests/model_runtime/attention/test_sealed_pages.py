"""Sealed pages on a CPU: their bytes against numpy, and their reads against float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.sealed.cache import SealedCache
from ropewalk.model_runtime.attention.sealed.cpu_backend import SealedCpuAttention
from ropewalk.model_runtime.attention.sealed.page_format import FORMATS
from ropewalk.model_runtime.attention.sealed.torch_backend import SealedTorchAttention
from ropewalk.model_runtime.errors import ModelError
from ropewalk.rope import DualChunk, PositionMethod, ReRope, SelfExtend, Shifted, Sinks
from tests.oracles import position_oracle as oracle
from tests.oracles.range_cases import CPU, DIM, HEADS, KEY_HEADS, LAYERS, PlacedReads, largest_error
from tests.oracles.sealed_mutants import ReadAfterTheStep, ReadAtTheWrite
from tests.oracles.sealed_reference import BITS, SMALL_GROUPS, codes, sealed_pages

PAGE = 32
FORMS = {kind: replace(FORMATS[kind], group=SMALL_GROUPS.get(kind)) for kind in FORMATS}
METHODS: dict[str, tuple[PositionMethod, oracle.Distance]] = {
    "rerope": (ReRope(40), oracle.rerope(40)),
    "self_extend": (SelfExtend(12, 4), oracle.self_extend(12, 4)),
    "string": (Shifted(50, 5), oracle.string(50, 5)),
    "sinks": (Sinks(3, 70), oracle.sinks(3, 70)),
    "dual_chunk": (DualChunk(48, 16), oracle.dual_chunk(32, 48)),
}


class Shape:
    """A layer."""

    num_key_heads = KEY_HEADS

    def __init__(self, key_dim: int = DIM, value_dim: int = DIM) -> None:
        self.key_dim, self.value_dim = key_dim, value_dim


class Laid(PlacedReads):
    """The reads of `PlacedReads` over sealed pages; the second half of each row does not rotate."""

    def __init__(self, kind: str, method: PositionMethod, **options: Any) -> None:
        super().__init__(method, page=PAGE, **options)
        self.kind = kind
        self.store = SealedCache(
            {0: Shape()},
            len(self.keys),
            PAGE,
            self.dtype,
            form=FORMS[kind],
            num_open=len(self.spans),
        )
        for tensor in self.store.pages(0):
            tensor.view(torch.uint8).fill_(0xFF)  # NaN where nothing was written
        self.spans = [span._replace(open_page=at) for at, span in enumerate(self.spans)]

    def chunk(self, index: int, first: int, end: int) -> Span:
        """The positions of a sequence from `first` up to `end`."""
        return self.spans[index]._replace(token_ids=[0] * (end - first), first_position=first)

    backend: type[SealedCpuAttention | SealedTorchAttention] = SealedCpuAttention

    def step(self, spans: list[Span], query: Tensor | None = None, **options: Any) -> Tensor:
        """Write the keys and values of a step, and return its attention."""
        batch = self.store.with_own_pages(build_batch(spans, PAGE, CPU), spans)
        attention = self.backend(batch)
        pages = batch.page_T
        key_TKD = self.keys[pages, :, :, batch.offset_T]
        value_TKV = self.values[pages, :, batch.offset_T]
        attention.write(*self.store.pages(0), key_TKD, value_TKV)
        if query is None:
            query = torch.zeros(len(pages), HEADS, DIM, dtype=self.dtype)
        plain = {"scaling": DIM**-0.5, "sliding_window": None, "softcap": None, "sinks_H": None}
        read = LayerRead(query, *self.store.pages(0), self.tables, **{**plain, **options})
        return attention.read(read)

    def run(self, **options: Any) -> Tensor:
        """Write what comes before the queries, then read in one step."""
        for index, (context, queries) in enumerate(self.contexts):
            if context > queries:
                self.step([self.chunk(index, 0, context - queries)])
        return self.step(self.spans, self.query, **options)

    def seal(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of each sequence as they are read when sealed, float64 [C, K, X]."""
        found = []
        for span in self.spans:
            keys = self.keys[span.pages].permute(0, 3, 1, 2).flatten(0, 1)
            values = self.values[span.pages].transpose(1, 2).flatten(0, 1)
            bits = BITS[self.kind]
            found.append((
                sealed_pages(keys, PAGE, bits[0], by_channel=True),
                sealed_pages(
                    values, PAGE, bits[1], by_channel=False, group=SMALL_GROUPS.get(self.kind)
                ),
            ))  # fmt: skip
        return found

    def expected(self, distance: oracle.Distance, **options: Any) -> Tensor:
        """The same reads in float64, each row over its own page and the sealed ones before it."""
        rows = []
        whole = self.keys, self.values
        old = self.seal()
        inv_freq_P = self.profile.scaling.frequencies(self.native.rotary).inv_freq_P
        token = 0
        for index, ((context, queries), span) in enumerate(
            zip(self.contexts, self.spans, strict=True)
        ):
            is_native = index % 2 == 1
            layer = oracle.OracleLayer(
                DIM**-0.5,
                options.get("sliding_window"),
                options.get("softcap"),
                options.get("sinks_H"),
                None if is_native else self.logn_len,
                1.0 if is_native else self.method.attention_factor,
            )
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


@pytest.mark.sampled(fixed=0, drawn=4, by="kind")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layer", ["plain", "all"])
def test_reads_equal_float64_over_sealed_and_exact_pages(kind: str, name: str, layer: str) -> None:
    """Earlier pages are read sealed and the own page exact, with and without a method."""
    method, distance = METHODS[name]
    share = 0.5 if layer == "all" else 1.0
    laid = Laid(kind, method, share=share, logn_len=16 if layer == "plain" else None)
    got = laid.run(**LAYERS[layer])
    assert largest_error(got, laid.expected(distance, **LAYERS[layer])) < 1e-5


@pytest.mark.parametrize(
    ("kind", "name"), [("int8", "rerope"), ("k8v4", "sinks"), ("int4", "dual_chunk")]
)
def test_the_reference_reads_and_seals_like_the_kernels(kind: str, name: str) -> None:
    """It serves processors on which no kernel compiles. Records are equal to the bit."""
    method, distance = METHODS[name]
    found = []
    for backend in (SealedCpuAttention, SealedTorchAttention):
        torch.manual_seed(3)
        laid = Laid(kind, method, share=0.5)
        laid.backend = backend
        got = laid.run(**LAYERS["all"])
        assert largest_error(got, laid.expected(distance, **LAYERS["all"])) < 1e-5
        size = FORMS[kind].parameter_bytes(Shape(), PAGE)[1]
        full = [
            span.pages[: (context - 1) // PAGE]
            for (context, _), span in zip(laid.contexts, laid.spans, strict=True)
        ]
        found.append([laid.store.pages(0)[0][pages, :, :size] for pages in full])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


@pytest.mark.costly
@pytest.mark.parametrize("kind", BITS)
def test_bfloat16_pages_are_read_without_further_rounding(kind: str) -> None:
    """The open page is bfloat16, and sums are float32."""
    laid = Laid(kind, METHODS["rerope"][0], dtype=torch.bfloat16)
    got = laid.run()
    # The answer of a bfloat16 query is rounded to bfloat16 by the model only.
    assert largest_error(got, laid.expected(METHODS["rerope"][1])) < 5e-3


@pytest.mark.parametrize("kind", BITS)
def test_rows_and_records_have_the_same_bits_in_any_chunk(kind: str) -> None:
    """No chunk's end decides which page is read in which form."""
    answers, records = [], []
    for sizes in ((120,), (1,), (7,), (31, 33), (32,), (64, 3)):
        torch.manual_seed(3)
        laid = Laid(kind, METHODS["rerope"][0])
        parts, first, turn = [], 0, 0
        while first < 120:
            end = min(120, first + sizes[turn % len(sizes)])
            parts.append(laid.step([laid.chunk(0, first, end)], laid.query[first:end]))
            first, turn = end, turn + 1
        answers.append(torch.cat(parts))
        records.append(laid.store.pages(0)[0][laid.spans[0].pages[:3]].clone())
    assert all(torch.equal(each, answers[0]) for each in answers)
    assert all(torch.equal(each, records[0]) for each in records)


@pytest.mark.parametrize("backend", [ReadAfterTheStep, ReadAtTheWrite])
def test_other_times_to_seal_would_follow_the_chunks(backend: type[SealedCpuAttention]) -> None:
    """The test above would see both mistakes."""
    answers = []
    for size in (120, 7):
        torch.manual_seed(3)
        laid = Laid("int4", METHODS["rerope"][0])
        laid.backend = backend
        chunks = [range(first, min(120, first + size)) for first in range(0, 120, size)]
        parts = [
            laid.step([laid.chunk(0, each.start, each.stop)], laid.query[each.start : each.stop])
            for each in chunks
        ]
        answers.append(torch.cat(parts))
    assert not torch.equal(*answers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "value_dim", "group"),
    [("int8", 20, 20), ("k8v4", 20, 20), ("k8v4", 64, 32), ("int4", 20, 20), ("int4", 64, 64)],
)
def test_records_equal_those_of_numpy(
    kind: str, value_dim: int, group: int, dtype: torch.dtype
) -> None:
    """Constants, zeros, tiny and huge numbers, a bias, an outlier, infinity and NaN."""
    dim = 24
    store = SealedCache({0: Shape(dim, value_dim)}, 1, PAGE, dtype, form=FORMATS[kind], num_open=1)
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
    key_TKD, value_TKV = key_TKD.to(dtype), value_TKV.to(dtype)
    span = Span([0] * PAGE, 0, [0], 0, range(0))
    batch = store.with_own_pages(build_batch([span], PAGE, CPU), [span])
    SealedCpuAttention(batch).write(*store.pages(0), key_TKD, value_TKV)
    expected = [
        _record(
            key_TKD[:, head].T.float().numpy(),
            value_TKV[:, head].float().numpy().reshape(-1, group),
            kind,
        )
        for head in range(KEY_HEADS)
    ]
    for got, wanted in zip(store.pages(0)[0][0].numpy(), expected, strict=True):
        assert got[: len(wanted)].tobytes() == wanted
        assert len(got) % 64 == 0
        assert len(got) - len(wanted) < 64


@pytest.mark.parametrize("bias", [92.8, -92.8, 700.3, 3e-5])
@pytest.mark.parametrize("kind", BITS)
def test_a_bias_costs_no_more_than_half_a_step(kind: str, bias: float) -> None:
    """A lowest number above the true one would cut off what lies below it."""
    dim, value_dim = 24, 20
    store = SealedCache(
        {0: Shape(dim, value_dim)}, 1, PAGE, torch.float32, form=FORMATS[kind], num_open=1
    )
    torch.manual_seed(4)
    key_TKD = bias + torch.rand(PAGE, KEY_HEADS, dim)
    span = Span([0] * PAGE, 0, [0], 0, range(0))
    batch = store.with_own_pages(build_batch([span], PAGE, CPU), [span])
    values = torch.zeros(PAGE, KEY_HEADS, value_dim)
    SealedCpuAttention(batch).write(*store.pages(0), key_TKD, values)
    key_bits, value_bits = BITS[kind]
    at = PAGE * (dim * key_bits + value_dim * value_bits) // 8
    for head in range(KEY_HEADS):
        record = store.pages(0)[0][0, head].numpy()
        code = record[: dim * PAGE * key_bits // 8].reshape(dim, -1)
        code_DO = code if key_bits == 8 else np.concatenate((code & 15, code >> 4), 1)
        low_D, step_D = record[at : at + 4 * dim].view(np.float16).reshape(2, dim).astype(float)
        exact_DO = key_TKD[:, head].T.double().numpy()
        error_DO = np.abs(code_DO * step_D[:, None] + low_D[:, None] - exact_DO)
        assert (low_D <= exact_DO.min(1)).all()
        # A float16 step may be too short by 2^-11 of itself, which all codes below the last add.
        most = 0.5 + 2.0**-11 * 2**key_bits
        assert (error_DO <= most * step_D[:, None] + 1e-4 * abs(bias) * 2**-7).all()


def _record(keys_DO: NDArray[Any], values_XV: NDArray[Any], kind: str) -> bytes:
    parts, parameters = [], []
    for rows, bits in zip((keys_DO, values_XV), BITS[kind], strict=True):
        code, low, step = codes(rows, bits)
        if bits == 4:
            half = code.shape[1] // 2
            code = code[:, :half] | (code[:, half:] << 4)
        parts.append(code.tobytes())
        parameters += [low.tobytes(), np.where(np.isnan(step), np.float16(np.nan), step).tobytes()]
    return b"".join((*parts, *parameters))


@pytest.mark.costly
def test_a_channel_without_a_number_stays_without_one() -> None:
    """NaN and infinity come back as NaN, so that an answer over them is found to be bad."""
    torch.manual_seed(0)
    laid = Laid("int4", METHODS["rerope"][0])
    laid.keys[laid.spans[0].pages[0], 0, 3, 7] = torch.inf
    got = laid.step([laid.chunk(0, 0, 120)], laid.query[:120])
    group = HEADS // KEY_HEADS
    assert got[:7].isfinite().all()
    assert got[32:, :group].isnan().all()
    assert got[:, group:].isfinite().all()


def test_odd_values_have_no_four_bits() -> None:
    """Two dimensions share a byte."""
    with pytest.raises(ModelError, match="a layer of this model has 15: use int8 or auto"):
        SealedCache({0: Shape(16, 15)}, 1, PAGE, torch.float32, form=FORMATS["k8v4"], num_open=1)


@pytest.mark.parametrize(("kind", "num_bytes"), [("int8", 136), ("k8v4", 108), ("int4", 72)])
def test_bytes_of_a_token_and_head(kind: str, num_bytes: int) -> None:
    """Of 64 dimensions and pages of 64, where float32 has 512."""
    shape = Shape(64, 64)
    assert FORMATS[kind].record_bytes(shape, 64) == num_bytes * 64
    store = SealedCache({0: shape, 1: shape}, 10, 64, torch.float32, form=FORMATS[kind], num_open=3)
    assert sum(each.nbytes for each in store.page_memory()) == 2 * KEY_HEADS * 10 * 64 * num_bytes
    open_bytes = 2 * 3 * KEY_HEADS * 64 * 512
    assert store.num_bytes == 2 * KEY_HEADS * 10 * 64 * num_bytes + open_bytes
