"""Few rows over oneDNN's packed memory have oneDNN's bits, or are left to it."""

import pytest
import torch
from torch import nn

from model_runtime import row_products
from model_runtime.lane_pairs import HAS_PAIR_PRODUCTS
from model_runtime.packed_linear import PackedProduct, is_available
from model_runtime.row_products import MOST_ROWS

pytestmark = pytest.mark.skipif(not is_available(), reason="torch without packed products")
DTYPES = [torch.float32, torch.bfloat16]


def product_of(linear: nn.Linear) -> PackedProduct:
    """Its packed product; `_few` is None where few rows are left to oneDNN."""
    return PackedProduct([linear.requires_grad_(requires_grad=False)], {})


def is_expected(dtype: torch.dtype) -> bool:
    """Whether this processor has what the trial has been seen to succeed with."""
    has_lanes = "avx512" in torch.backends.cpu.get_cpu_capability().lower()
    return has_lanes and (dtype == torch.float32 or HAS_PAIR_PRODUCTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("width_in", "width_out"), [(64, 64), (384, 100), (704, 448), (1536, 96), (3008, 160)]
)
def test_few_rows_have_the_bits_of_many(
    width_in: int, width_out: int, dtype: torch.dtype, *, bias: bool
) -> None:
    """one chain of sums or several, whole panels or not"""
    linear = nn.Linear(width_in, width_out, bias=bias).to(dtype)
    product = product_of(linear)
    if is_expected(dtype):
        assert product._few is not None, "found no chain, so nothing is tested here"
    x = torch.randn(512, width_in).to(dtype)
    many = product._multiply(x)
    for rows in range(1, MOST_ROWS + 1):
        few = torch.cat([product(part) for part in torch.split(x, rows)])
        assert torch.equal(few, many), rows


@pytest.mark.skipif(not is_expected(torch.float32), reason="few rows are left to oneDNN here")
def test_few_rows_do_not_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """nor what is left of many"""
    counts = []
    product = product_of(nn.Linear(64, 64))
    multiply = product._multiply
    monkeypatch.setattr(product, "_multiply", lambda x: counts.append(len(x)) or multiply(x))
    for rows in range(1, 32):
        product(torch.randn(rows, 64))
    assert counts == [24]
    product(torch.randn(140, 64))
    assert counts == [24, 128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_order_of_sums_is_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """bf16 hides most of the difference; the rows are oneDNN's then, and alike"""
    monkeypatch.setattr(row_products, "_CHAINS", (256, 128))
    product = product_of(nn.Linear(768, 448).to(dtype))
    assert product._few is None
    x = torch.randn(64, 768).to(dtype)
    assert torch.equal(torch.cat([product(row) for row in torch.split(x, 1)]), product(x))


def test_without_the_packed_memory_rows_are_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """as a torch that does not tell where it is would have it"""
    monkeypatch.setattr(row_products, "is_available", lambda: False)
    linear = nn.Linear(96, 80)
    x = torch.randn(40, 96)
    product = product_of(linear)
    assert torch.equal(torch.cat([product(row) for row in torch.split(x, 1)]), product(x))
    assert torch.allclose(product(x), linear(x), atol=1e-5)


@pytest.mark.skipif(not is_expected(torch.float32), reason="few rows are left to oneDNN here")
def test_threads_share_a_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """panel by panel, with the bits of one thread"""
    monkeypatch.setattr(row_products, "_BYTES_PER_SHARE", 1 << 12)
    linear = nn.Linear(96, 1000)
    x = torch.randn(5, 96)
    alone = product_of(linear)(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shared = product_of(linear)
        assert shared._few is not None
        assert len(shared._few._shares) == 3
        assert torch.equal(shared(x), alone)
        torch.set_num_threads(2)
        assert torch.allclose(shared(x), alone, atol=1e-5)  # found with three: left to oneDNN
    finally:
        torch.set_num_threads(threads)
