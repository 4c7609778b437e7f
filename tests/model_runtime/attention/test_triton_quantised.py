"""The GPU's kernels over quantised pages: on the device, or by Triton's interpreter without one.

Records are compared with those of `attention/quantised/torch_backend.py`, and reads with float64.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.attention.quantised.cache import QuantisedCache
from tests.oracles.attention_cases import Case, relative_error
from tests.oracles.attention_cases import Laid as OneRead
from tests.oracles.quantised_reads import METHODS, PAGE, Laid, Shape, edge_page, records_of
from tests.oracles.quantised_reference import BITS, SMALL_GROUPS
from tests.oracles.range_cases import CPU, LAYERS, largest_error

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu.quantised.backend import QuantisedTritonAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Torch's deterministic mode fills unwritten memory with NaN."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


# Whole pages and parts of some before the queries, prompts over three pages and within one, and
# single tokens at the first and the last place of a page.
CONTEXTS = ((98, 36), (70, 3), (64, 1), (65, 1), (1, 1), (97, 1))


def laid_on_device(kind: str, name: str, **options: Any) -> Laid:
    """Reads by the GPU's kernels."""
    torch.manual_seed(3)
    options = {"contexts": CONTEXTS, "device": DEVICE, **options}
    return Laid(kind, METHODS[name][0], QuantisedTritonAttention, **options)


@pytest.mark.sampled(fixed=0, drawn=1)
@pytest.mark.parametrize("kind", BITS)
def test_a_step_over_the_end_of_a_page_equals_float64(kind: str) -> None:
    """A prompt whose first token fills a page, beside the last and the first token of one."""
    laid = laid_on_device(kind, "rerope", contexts=((66, 3), (64, 1), (65, 1)))
    assert largest_error(laid.run(), laid.expected(METHODS["rerope"][1])) < 1e-5


def read_over(kind: str, case: Case, device_backend: Any) -> Tensor:
    """The read of a case by the GPU's kernels, or by the reference on a CPU without them."""
    torch.manual_seed(7)
    laid = OneRead(case, DEVICE if device_backend else CPU)
    (_, num_heads), (dim, value_dim) = case.heads, case.dims
    plan = LayerPlan(num_heads, dim, value_dim, "all", dim, interleaved=False)
    store = QuantisedCache(
        CacheLayout({0: plan}, case.dtype, case.page_size, kind), len(laid.read.keys_NKDO),
        num_tails=len(case.spans), has_kernels=False, device=laid.device,
        device_backend=device_backend,
    )  # fmt: skip
    tables = laid.batch.page_table_SN.tolist()
    spans = [
        Span([0] * place.num_tokens, place.first_position, table, place.table_id, range(0))
        for place, table in zip(laid.batch.places_S, tables, strict=True)
    ]
    spans = [span._replace(tail_page=at) for at, span in enumerate(spans)]
    before = [
        (index, span._replace(token_ids=[0] * span.first_position, first_position=0))
        for index, span in enumerate(spans)
        if span.first_position
    ]
    for step in (before, list(enumerate(spans))):
        told = [span for _, span in step]
        batch = store.with_own_pages(build_batch(told, case.page_size, laid.device), told)
        attention: Any = store.own_backend()(batch)
        keys, values = (
            torch.cat([
                numbers[index][span.first_position :][: len(span.token_ids)]
                for index, span in step
            ]).to(laid.device, case.dtype)
            for numbers in (laid.keys, laid.values)
        )  # fmt: skip
        attention.write(*store.pages(0), keys, values)
    records, tails = store.pages(0)
    found: Tensor = attention.read(replace(laid.read, keys_NKDO=records, values_NKOV=tails))
    return found


@pytest.mark.sampled(fixed=0, drawn=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", BITS)
def test_layers_with_all_features_are_read_like_the_reference(
    kind: str, dtype: torch.dtype
) -> None:
    """Values have other dimensions than keys, half of which rotates; and groups, in k8v4."""
    case = Case(
        spans=((70, 1), (65, 1), (68, 5)), heads=(4, 2), dims=(24, 64), rotary_share=0.5,
        page_size=32, dtype=dtype, window=40, softcap=5.0, has_sinks=True,
    )  # fmt: skip
    got, expected = (read_over(kind, case, each) for each in (QuantisedTritonAttention, None))
    # The GPU multiplies widened numbers in the type of the model.
    most = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative_error(got, expected.double()) < most


@pytest.mark.costly
@pytest.mark.sampled(fixed=0, drawn=1)
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layer", ["plain", "all"])
def test_reads_equal_float64_over_quantised_and_exact_pages(
    kind: str, name: str, layer: str
) -> None:
    """Earlier pages are read quantised and the own page exact, with and without a method."""
    share = 0.5 if layer == "all" else 1.0
    laid = laid_on_device(kind, name, share=share, logn_len=16 if layer == "plain" else None)
    got = laid.run(**LAYERS[layer])
    assert largest_error(got, laid.expected(METHODS[name][1], **LAYERS[layer])) < 1e-5


@pytest.mark.sampled(fixed=0, drawn=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "value_dim", "group"),
    [
        *(("int8", 20, 20), ("int8", 15, 15), ("k8v4", 20, 20), ("k8v4", 64, 32)),
        *(("int4", 20, 20), ("int4", 128, 64)),
    ],
)
def test_records_equal_those_of_numpy(
    kind: str, value_dim: int, group: int, dtype: torch.dtype
) -> None:
    """Constants, zeros, tiny and huge numbers, a bias, an outlier, infinity and NaN.

    A division of Triton would be off by two units, and a rounding up would cut a bias off.
    """
    dim = 24
    store = QuantisedCache(
        CacheLayout({0: Shape(dim, value_dim)}, dtype, PAGE, kind), 2, num_tails=2, device=DEVICE,
        device_backend=QuantisedTritonAttention,
    )  # fmt: skip
    key_TKD, value_TKV = edge_page(dim, value_dim, dtype)
    expected = records_of(key_TKD, value_TKV, kind, group)
    span = Span([0] * PAGE, 0, [1], 0, range(0), tail_page=1)
    batch = store.with_own_pages(build_batch([span], PAGE, DEVICE), [span])
    QuantisedTritonAttention(batch).write(*store.pages(0), key_TKD.to(DEVICE), value_TKV.to(DEVICE))
    for got, wanted in zip(store.pages(0)[0][1].cpu().numpy(), expected, strict=True):
        assert got[: len(wanted)].tobytes() == wanted


@pytest.mark.costly
def test_a_channel_without_a_number_stays_without_one() -> None:
    """NaN and infinity come back as NaN in prompts and decodes, so that the answer is refused."""
    laid = laid_on_device("int4", "rerope", contexts=((40, 5), (41, 1)))
    laid.keys[laid.spans[0].pages[0], 0, 3, 7] = torch.inf
    laid.values[laid.spans[1].pages[0], 1, 9, 2] = torch.nan
    got = laid.run().cpu()
    group = got.shape[1] // 2
    assert got[:5, :group].isnan().all()
    assert got[:5, group:].isfinite().all()
    assert got[5, group:, : SMALL_GROUPS["int4"]].isnan().all()  # the group of the number
    assert got[5, :group].isfinite().all()
