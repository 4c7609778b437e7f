"""The GPU's kernels over sealed pages: on the device, or by Triton's interpreter without one.

Records are compared with those of `attention/sealed/torch_backend.py`, and reads with float64.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.sealed.cache import SealedCache
from ropewalk.model_runtime.attention.sealed.page_format import FORMATS
from tests.oracles.range_cases import LAYERS, largest_error
from tests.oracles.sealed_reads import METHODS, PAGE, Laid, Shape, edge_page, records_of
from tests.oracles.sealed_reference import BITS

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu.sealed.backend import SealedTritonAttention

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
    return Laid(kind, METHODS[name][0], SealedTritonAttention, **options)


@pytest.mark.sampled(fixed=0, drawn=2, by="kind")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layer", ["plain", "all"])
def test_reads_equal_float64_over_sealed_and_exact_pages(kind: str, name: str, layer: str) -> None:
    """Earlier pages are read sealed and the own page exact, with and without a method."""
    share = 0.5 if layer == "all" else 1.0
    laid = laid_on_device(kind, name, share=share, logn_len=16 if layer == "plain" else None)
    got = laid.run(**LAYERS[layer])
    assert largest_error(got, laid.expected(METHODS[name][1], **LAYERS[layer])) < 1e-5


@pytest.mark.sampled(drawn=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "value_dim", "group"),
    [
        *(("int8", 20, 20), ("int8", 15, 15), ("k8v4", 20, 20), ("k8v4", 64, 32)),
        *(("int4", 20, 20), ("int4", 64, 64)),
    ],
)
def test_records_equal_those_of_numpy(
    kind: str, value_dim: int, group: int, dtype: torch.dtype
) -> None:
    """Constants, zeros, tiny and huge numbers, a bias, an outlier, infinity and NaN.

    A division of Triton would be off by two units, and a rounding up would cut a bias off.
    """
    dim = 24
    store = SealedCache(
        {0: Shape(dim, value_dim)}, 2, PAGE, dtype, form=FORMATS[kind], num_open=2, device=DEVICE,
        device_backend=SealedTritonAttention,
    )  # fmt: skip
    key_TKD, value_TKV = edge_page(dim, value_dim, dtype)
    expected = records_of(key_TKD, value_TKV, kind, group)
    span = Span([0] * PAGE, 0, [1], 0, range(0), open_page=1)
    batch = store.with_own_pages(build_batch([span], PAGE, DEVICE), [span])
    SealedTritonAttention(batch).write(*store.pages(0), key_TKD.to(DEVICE), value_TKV.to(DEVICE))
    for got, wanted in zip(store.pages(0)[0][1].cpu().numpy(), expected, strict=True):
        assert got[: len(wanted)].tobytes() == wanted
