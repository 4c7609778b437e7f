"""Few rows over oneDNN's packed memory have oneDNN's bits, or oneDNN multiplies them."""

import pytest
import torch
from torch import nn

from ropewalk.model_runtime.cpu_kernels import skinny_gemm
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import MOST_ROWS
from ropewalk.model_runtime.layers import onednn, packed_product
from ropewalk.model_runtime.layers.packed_product import PackedProduct, Way, Workshop
from ropewalk.model_runtime.layers.way_trial import is_possible


def product_of(linear: nn.Linear, way: Way = Way.ONEDNN) -> PackedProduct:
    """The product of a linear; `_skinny` is None if few rows are left to oneDNN."""
    return PackedProduct([linear.requires_grad_(requires_grad=False)], Workshop(way))


# Ways with a library product of many rows beside our own of few. Without AMX, oneDNN's product of
# bfloat16 was seen to have the order of sums that ours has.
WAYS = [
    (torch.float32, Way.ONEDNN),
    (torch.bfloat16, Way.ONEDNN),
    (torch.bfloat16, Way.STORED),
]
IS_KNOWN = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}


@pytest.fixture(autouse=True)
def _onednn() -> None:
    if not is_possible(Way.ONEDNN, torch.float32):
        assert not IS_KNOWN, "the order of sums was not found, so nothing is tested here"
        pytest.skip("no packed products of oneDNN on this processor or with this torch")


@pytest.mark.parametrize(("dtype", "way"), WAYS)
@pytest.mark.parametrize(
    ("width_in", "width_out", "bias"),
    [(64, 64, False), (384, 100, True), (704, 448, True), (3008, 160, False)],
)
def test_few_rows_have_the_bits_of_many(
    width_in: int, width_out: int, dtype: torch.dtype, way: Way, *, bias: bool
) -> None:
    """The tested weights need one chain of sums or several, in whole panels or not."""
    if not is_possible(way, dtype):
        pytest.skip(f"no {way.name} of {dtype} on this processor")
    linear = nn.Linear(width_in, width_out, bias=bias).to(dtype)
    product = product_of(linear, way)
    if IS_KNOWN and (dtype, way) != (torch.bfloat16, Way.ONEDNN):
        assert product.way is way, "found no chain, so nothing is tested here"
        assert product._skinny is not None, "found no chain, so nothing is tested here"
    x = torch.randn(512, width_in).to(dtype)
    many = product(x) if product._skinny is None else product._multiply(x)
    for rows in range(1, MOST_ROWS + 1):
        few = torch.cat([product(part) for part in torch.split(x, rows)])
        assert torch.equal(few, many), rows


@pytest.mark.parametrize(("dtype", "way"), WAYS)
@pytest.mark.parametrize("unit", [0.0, 1 / 64])
def test_the_first_weight_of_a_shape_does_not_decide(
    unit: float, dtype: torch.dtype, way: Way
) -> None:
    """Zeros, or multiples of 1/64, have the same sums in any order; the next weight has not."""
    if not is_possible(way, dtype):
        pytest.skip(f"no {way.name} of {dtype} on this processor")
    workshop = Workshop(way)
    first, second = (nn.Linear(3008, 160, bias=False).to(dtype) for _ in range(2))
    first.weight.data = (first.weight / unit).round() * unit if unit else 0 * first.weight
    products = [
        PackedProduct([each.requires_grad_(requires_grad=False)], workshop)
        for each in (first, second)
    ]
    x = torch.randn(64, 3008).to(dtype)
    for product in products:
        assert torch.equal(torch.cat([product(row) for row in torch.split(x, 1)]), product(x))


@pytest.mark.skipif(not IS_KNOWN, reason="few rows are left to oneDNN here")
def test_the_trial_has_no_last_row_alone() -> None:
    """With 1000 outputs, 17 rows have enough values, and the last block would have one row."""
    assert -(-packed_product._TRIAL_VALUES[torch.float32] // 1000) % MOST_ROWS == 1
    assert product_of(nn.Linear(1280, 1000))._skinny is not None


@pytest.mark.skipif(not IS_KNOWN, reason="few rows are left to oneDNN here")
def test_few_rows_do_not_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither few rows nor the remainder of many rows reach the library."""
    counts = []
    product = product_of(nn.Linear(64, 64))
    multiply = product._multiply
    monkeypatch.setattr(product, "_multiply", lambda x: counts.append(len(x)) or multiply(x))
    for rows in range(1, 32):
        product(torch.randn(rows, 64))
    assert counts == [24]
    product(torch.randn(140, 64))
    assert counts == [24, 128]


@pytest.mark.parametrize(("dtype", "way"), WAYS)
def test_another_order_of_sums_is_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, way: Way
) -> None:
    """The difference must be seen in bfloat16 too, which hides most of it.

    One of the two ways multiplies all rows then.
    """
    if not is_possible(way, dtype):
        pytest.skip(f"no {way.name} of {dtype} on this processor")
    monkeypatch.setattr(packed_product, "_CHAINS", (256, 128))
    monkeypatch.setattr(packed_product, "random_trial", packed_product.random_trial.__wrapped__)
    product = product_of(nn.Linear(3072, 448).to(dtype), way)
    assert (product._skinny is None) is (way is Way.ONEDNN)
    assert product.way is (Way.OWN if way is Way.STORED else way)
    x = torch.randn(64, 3072).to(dtype)
    assert torch.equal(torch.cat([product(row) for row in torch.split(x, 1)]), product(x))


def test_without_the_packed_memory_rows_are_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A build of torch may not expose the address of the packed memory."""
    monkeypatch.setattr(onednn, "shows_memory", lambda: False)
    monkeypatch.setattr(packed_product, "random_trial", packed_product.random_trial.__wrapped__)
    linear = nn.Linear(96, 80)
    x = torch.randn(40, 96)
    product = product_of(linear)
    assert torch.equal(torch.cat([product(row) for row in torch.split(x, 1)]), product(x))
    assert torch.allclose(product(x), linear(x), atol=1e-5)


@pytest.mark.skipif(not IS_KNOWN, reason="few rows are left to oneDNN here")
def test_threads_share_a_large_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is whole panels, so the bits are those of one thread."""
    monkeypatch.setattr(skinny_gemm, "_BYTES_PER_THREAD", 1 << 12)
    linear = nn.Linear(96, 1000)
    x = torch.randn(5, 96)
    alone = product_of(linear)(x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shared = product_of(linear)
        assert shared._skinny is not None
        assert shared._skinny._num_threads(len(x)) == 3
        assert torch.equal(shared(x), alone)
        torch.set_num_threads(2)
        assert torch.allclose(shared(x), alone, atol=1e-5)  # found with three: left to oneDNN
    finally:
        torch.set_num_threads(threads)
