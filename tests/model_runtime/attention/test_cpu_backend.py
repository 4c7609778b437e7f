"""The compiled kernel beside the torch reference: bits, places, and the reference in float64.

The kernel's own reads are compared with float64 in `cpu_kernels/test_attention_dot.py`.
"""

from dataclasses import replace

import pytest
import torch

from ropewalk.model_runtime.attention.batch import build_batch
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from tests.oracles.attention_cases import Case, Laid, cases, relative_error
from tests.oracles.range_cases import CPU

DTYPES = [torch.float32, torch.bfloat16]


def laid(dtype: torch.dtype = torch.float32) -> Laid:
    """Sequences at different lengths and profiles over shuffled pages, in a CPU's layout."""
    return Laid(Case(dtype=dtype, row_keys=False), CPU)


@pytest.mark.parametrize(
    "name", [name for name, case in cases().items() if case.dtype == torch.float32]
)
def test_the_reference_equals_float64(name: str) -> None:
    """Every feature of a layer; memory behind the last token has NaN."""
    case = Laid(cases()[name], CPU)
    assert relative_error(TorchAttention(case.batch).read(case.read), case.expected()) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_alone_and_on_any_number_of_threads(dtype: torch.dtype) -> None:
    """A row has the same bits in any batch and on any number of threads, for promise 2."""
    case = laid(dtype)
    whole = CpuAttention(case.batch).read(case.read)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(CpuAttention(case.batch).read(case.read), whole)
    finally:
        torch.set_num_threads(threads)
    for place, span in zip(case.batch.places_S, case.spans, strict=True):
        rows = slice(place.begin, place.begin + place.num_tokens)
        read = replace(case.read, query_THD=case.read.query_THD[rows])
        assert torch.equal(CpuAttention(build_batch([span], 16, CPU)).read(read), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_backends_write_to_the_same_places(dtype: torch.dtype) -> None:
    """Both backends write to the same places of the cache, and to no other place."""
    case = laid(dtype)
    key, value = torch.randn(2, len(case.read.query_THD), 2, 24).to(dtype)
    written = []
    for backend in (TorchAttention, CpuAttention):
        pages = torch.zeros_like(case.read.keys_NKDO), torch.zeros_like(case.read.values_NKOV)
        backend(case.batch).write(*pages, key, value)
        written.append(pages)
    assert torch.equal(written[0][0], written[1][0])
    assert torch.equal(written[0][1], written[1][1])
    page, offset = case.batch.page_T[5], case.batch.offset_T[5]
    assert torch.equal(written[1][0][page, :, :, offset], key[5])
    assert torch.equal(written[1][1][page, :, offset], value[5])
    assert int((written[1][0] != 0).sum()) == key.numel()
