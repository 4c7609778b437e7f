"""Quantised pages on a CPU: their bytes against numpy, and their reads against float64."""

from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.quantised.cache import QuantisedCache
from ropewalk.model_runtime.attention.quantised.cpu_backend import QuantisedCpuAttention
from ropewalk.model_runtime.attention.quantised.page_format import FORMATS
from ropewalk.model_runtime.attention.quantised.torch_backend import QuantisedTorchAttention
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import AngleArrays
from ropewalk.model_runtime.cpu_kernels.quantised.records import Sides, turn_quantised, widen_values
from ropewalk.model_runtime.errors import ModelError
from tests.oracles.quantised_mutants import ReadAfterTheStep, ReadAtTheWrite
from tests.oracles.quantised_reads import FORMS, METHODS, PAGE, Laid, Shape, edge_page, records_of
from tests.oracles.quantised_reference import BITS, quantised_pages, record
from tests.oracles.range_cases import CPU, HEADS, KEY_HEADS, LAYERS, largest_error


@pytest.mark.parametrize(
    ("kind", "name", "layer"),
    [
        *(("int8", "rerope", "all"), ("k8v4", "sinks", "all"), ("int4", "dual_chunk", "all")),
        *(("int8", "self_extend", "plain"), ("k8v4", "rerope", "plain")),
        ("int4", "string", "plain"),
    ],
)
def test_kernels_and_the_reference_read_and_quantise_as_float64_says(
    kind: str, name: str, layer: str
) -> None:
    """Earlier pages are read quantised and the own page exact, with and without a method.

    The reference serves processors on which no kernel compiles. Records are equal to the bit.
    """
    method, distance = METHODS[name]
    form: dict[str, Any] = {"share": 0.5} if layer == "all" else {"logn_len": 16}
    found = []
    for backend in (QuantisedCpuAttention, QuantisedTorchAttention):
        torch.manual_seed(3)
        laid = Laid(kind, method, **form)
        laid.backend = backend
        got = laid.run(**LAYERS[layer])
        assert largest_error(got, laid.expected(distance, **LAYERS[layer])) < 1e-5
        size = FORMS[kind].parameter_bytes(Shape(), PAGE)[1]
        full = [
            span.pages[: (context - 1) // PAGE]
            for (context, _), span in zip(laid.contexts, laid.spans, strict=True)
        ]
        found.append([laid.store.pages(0)[0][pages, :, :size] for pages in full])
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


@pytest.mark.parametrize("kind", BITS)
def test_bfloat16_pages_are_read_without_further_rounding(kind: str) -> None:
    """The tail page is bfloat16, and sums are float32."""
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
def test_other_times_to_quantise_would_follow_the_chunks(
    backend: type[QuantisedCpuAttention],
) -> None:
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
    [("int8", 20, 20), ("k8v4", 20, 20), ("k8v4", 64, 32), ("int4", 20, 20), ("int4", 128, 64)],
)
def test_records_equal_those_of_numpy(
    kind: str, value_dim: int, group: int, dtype: torch.dtype
) -> None:
    """Constants, zeros, tiny and huge numbers, a bias, an outlier, infinity and NaN."""
    dim = 24
    layout = CacheLayout({0: Shape(dim, value_dim)}, dtype, PAGE, kind)
    store = QuantisedCache(layout, 1, num_tails=1)
    key_TKD, value_TKV = edge_page(dim, value_dim, dtype)
    span = Span([0] * PAGE, 0, [0], 0, range(0))
    batch = store.with_own_pages(build_batch([span], PAGE, CPU), [span])
    QuantisedCpuAttention(batch).write(*store.pages(0), key_TKD, value_TKV)
    expected = records_of(key_TKD, value_TKV, kind, group)
    for got, wanted in zip(store.pages(0)[0][0].numpy(), expected, strict=True):
        assert got[: len(wanted)].tobytes() == wanted
        assert len(got) % 64 == 0
        assert len(got) - len(wanted) < 64


@pytest.mark.parametrize(
    ("page_size", "value_dim"), [(64, 64), (64, 128), (32, 64), (96, 80)], ids=str
)
@pytest.mark.parametrize("kind", BITS)
def test_kernels_read_the_numbers_of_a_record(kind: str, page_size: int, value_dim: int) -> None:
    """Common sizes have kernels of their own. The angles of offsets are zero."""
    dim, pairs = 24, 9
    rng = np.random.default_rng(5)
    keys_DO = rng.normal(size=(dim, page_size)).astype(np.float32)
    values_OV = rng.normal(size=(page_size, value_dim)).astype(np.float32)
    key_bits, value_bits = BITS[kind]
    groups = FORMATS[kind].value_groups(value_dim)
    content = record(keys_DO, values_OV.reshape(page_size * groups, -1), kind)
    content_R = np.frombuffer(content, np.uint8)
    sides = Sides(1, dim, value_dim, page_size, key_bits, value_bits, groups)
    row_P = np.empty(4 * (dim + page_size * groups) + 64, np.float32)
    angles = AngleArrays(*(np.full((1, pairs, page_size), each, np.float32) for each in (1, 0)))
    found_DO = np.empty((dim, page_size), np.float32)
    turn_quantised(content_R.ctypes.data, 0, sides, angles, 0, row_P, found_DO)
    key_OHD = torch.from_numpy(keys_DO.T)[:, None]
    exact = quantised_pages(key_OHD, page_size, key_bits, by_channel=True)
    assert np.array_equal(found_DO, exact[:, 0].T.float().numpy())
    found_OV = np.empty((page_size + 1, -(-value_dim // 16) * 16), np.float32)
    widen_values(content_R.ctypes.data, sides, row_P, found_OV)
    value_OHV, group = torch.from_numpy(values_OV)[:, None], value_dim // groups
    exact = quantised_pages(value_OHV, page_size, value_bits, by_channel=False, group=group)
    assert np.array_equal(found_OV[:page_size, :value_dim], exact[:, 0].float().numpy())


@pytest.mark.parametrize("bias", [92.8, -92.8, 700.3, 3e-5])
@pytest.mark.parametrize("kind", BITS)
def test_a_bias_costs_no_more_than_half_a_step(kind: str, bias: float) -> None:
    """A lowest number above the true one would cut off what lies below it."""
    dim, value_dim = 24, 20
    layout = CacheLayout({0: Shape(dim, value_dim)}, torch.float32, PAGE, kind)
    store = QuantisedCache(layout, 1, num_tails=1)
    torch.manual_seed(4)
    key_TKD = bias + torch.rand(PAGE, KEY_HEADS, dim)
    span = Span([0] * PAGE, 0, [0], 0, range(0))
    batch = store.with_own_pages(build_batch([span], PAGE, CPU), [span])
    values = torch.zeros(PAGE, KEY_HEADS, value_dim)
    QuantisedCpuAttention(batch).write(*store.pages(0), key_TKD, values)
    key_bits, value_bits = BITS[kind]
    at = PAGE * (dim * key_bits + value_dim * value_bits) // 8
    for head in range(KEY_HEADS):
        record = store.pages(0)[0][0, head].numpy()
        code = record[: dim * PAGE * key_bits // 8].reshape(dim, -1)
        code_DO = code if key_bits == 8 else np.concatenate((code & 15, code >> 4), 1)
        parts = 1 if key_bits == 8 else 2  # of a channel
        parameters = record[at : at + 4 * dim * parts].view(np.float16).astype(float)
        low_DO, step_DO = parameters.reshape(2, parts, dim).repeat(PAGE // parts, 1).swapaxes(1, 2)
        exact_DO = key_TKD[:, head].T.double().numpy()
        error_DO = np.abs(code_DO * step_DO + low_DO - exact_DO)
        assert (low_DO <= exact_DO).all()
        # A float16 step may be too short by 2^-11 of itself, which all codes below the last add.
        most = 0.5 + 2.0**-11 * 2**key_bits
        assert (error_DO <= most * step_DO + 1e-4 * abs(bias) * 2**-7).all()


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
        CacheLayout({0: Shape(16, 15)}, torch.float32, PAGE, "k8v4").check()


@pytest.mark.parametrize(
    ("kind", "num_bytes", "of_128"), [("int8", 136, 268), ("k8v4", 108, 216), ("int4", 76, 152)]
)
def test_bytes_of_a_token_and_head(kind: str, num_bytes: int, of_128: int) -> None:
    """Of 64 dimensions and pages of 64, where float32 has 512; and of 128 dimensions."""
    shape = Shape(64, 64)
    assert FORMATS[kind].record_bytes(shape, 64) == num_bytes * 64
    assert FORMATS[kind].record_bytes(Shape(128, 128), 64) == of_128 * 64
    layout = CacheLayout({0: shape, 1: shape}, torch.float32, 64, kind)
    store = QuantisedCache(layout, 10, num_tails=3)
    assert sum(each.nbytes for each in store.page_memory()) == 2 * KEY_HEADS * 10 * 64 * num_bytes
    tail_bytes = 2 * 3 * KEY_HEADS * 64 * 512
    assert store.num_bytes == 2 * KEY_HEADS * 10 * 64 * num_bytes + tail_bytes
