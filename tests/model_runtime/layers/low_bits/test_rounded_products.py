"""Rows rounded to eight bits, and their products with weights in few bits."""

import hashlib
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import BY_TYPE
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.grouped_products import (
    GroupedProducts,
    rounding_of,
)
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.integer_dot import INSTRUCTION
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.rounded_rows import (
    ORDERS,
    places_of,
    rounder,
)
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import widened
from ropewalk.model_runtime.cpu_kernels.low_bits.products import LowBits
from ropewalk.model_runtime.cpu_kernels.target import vectors
from ropewalk.model_runtime.layers.low_bits.modules import LowBitLinear, in_float_panels
from ropewalk.model_runtime.layers.low_bits.product import LowBitProduct, LowBitWorkshop
from ropewalk.model_runtime.layers.low_bits.rounded import round_activations
from tests.checkpoints.random_blocks import random_rows
from tests.model_runtime.layers.low_bits.test_low_bit_products import panels_of
from tests.processors import OLDER

Doubles = NDArray[np.float64]


def rounded(x_RK: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The rule in numpy: the codes of rows, and the scale of each 32 inputs."""
    groups = x_RK.reshape(len(x_RK), -1, 32)
    largest = np.abs(groups).max(-1)
    is_small = largest < np.float32(2.0**-100)
    scales = np.where(is_small, np.float32(0), largest / np.float32(127))
    inverse = np.where(is_small, np.float32(0), np.float32(127) / np.maximum(largest, 2.0**-100))
    codes = np.rint(groups * inverse[..., None].astype(np.float32))
    return codes.reshape(x_RK.shape).astype(np.int64), scales.astype(np.float32)


def values_of(x_RK: NDArray[np.float32]) -> Doubles:
    """The rows after rounding, in float64."""
    codes, scales = rounded(x_RK)
    return codes * np.repeat(scales.astype(np.float64), 32, axis=1)


def rows(num_rows: int, num_inputs: int) -> NDArray[np.float32]:
    """Rows with groups of zeros, of tiny numbers, of one outlier and of ties."""
    # torch's own draw differs between processors.
    x_RK = np.random.default_rng(3).standard_normal((num_rows, num_inputs)).astype(np.float32)
    x_RK[0, :32] = 0
    x_RK[0, 32:64] *= 2.0**-120
    x_RK[-1, 5] = -1000
    x_RK[-1, 32:64] = np.arange(32) + 0.5
    x_RK[-1, 63] = 127
    return x_RK


def test_rows_are_rounded_by_the_rule() -> None:
    """Codes in both orders, scales, and the sums of 32 and of 16 codes."""
    x_RK = rows(5, 96)
    records, wide_RK = rounder(2, 0).rows(x_RK)
    assert wide_RK is x_RK or np.array_equal(wide_RK, x_RK)
    places = places_of(96, 2)
    codes, scales = rounded(x_RK)
    groups = codes.reshape(5, 3, 32)
    for index, order in enumerate(ORDERS):
        found = records[:, index * 96 : (index + 1) * 96].view(np.int8).reshape(5, 3, 32)
        assert np.array_equal(found, groups[..., list(order)])
    stored = np.ascontiguousarray(records[:, places.scales : places.sums]).view(np.float32)
    assert np.array_equal(stored, scales)
    for size, first in ((32, places.sums), (16, places.half_sums)):
        count = 96 // size
        pairs = (
            np.ascontiguousarray(records[:, first : first + 8 * count])
            .view(np.int32)
            .reshape(5, count, 2)
        )
        sums = codes.reshape(5, count, size).sum(-1)
        assert np.array_equal(pairs[..., 0], sums)
        scaled = sums.astype(np.float32) * np.repeat(scales, 32 // size, axis=1)
        assert np.array_equal(np.ascontiguousarray(pairs[..., 1]).view(np.float32), scaled)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_no_finite_product(wrong: float) -> None:
    """Integers have no NaN, so the scale of the group has it."""
    panels = panels_of("Q4_0", random_rows("Q4_0", 64, 96))
    x_RK = rows(2, 96)
    x_RK[1, 40] = wrong
    kernels = LowBits([panels.kind], torch.float32)
    products = GroupedProducts(
        kernels.panels([panels], None), rounding_of([panels.kind], torch.float32)
    )
    found = products.multiply(x_RK)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


@cache
def products_of(
    type_names: tuple[str, ...], dtype: torch.dtype
) -> dict[str, tuple[LowBitProduct, LowBitLinear]]:
    """Products of rounded rows with 200 outputs and a bias, by one kernel, and their linears."""
    bias = torch.randn(200, generator=torch.manual_seed(1)).to(dtype)
    linears = [
        LowBitLinear(panels_of(each, random_rows(each, 200, 768)), bias, dtype)
        for each in type_names
    ]
    workshop = LowBitWorkshop(linears)
    modules = nn.ModuleList(nn.Module() for _ in linears)
    products = [LowBitProduct([each], workshop) for each in linears]
    for module, product in zip(modules, products, strict=True):
        module.product = product  # type: ignore[assignment]
    assert round_activations(modules, dtype)
    return dict(zip(type_names, zip(products, linears, strict=True), strict=True))


# A kernel takes seconds to compile, and rows of both number types are rounded by one rule. So each
# of these types has a kernel of its own, and the others share one, as the types of a file do.
IN_BFLOAT16 = ("Q8_0", "Q4_1", "Q3_K", "IQ4_XS")
OTHERS = tuple(each for each in BY_TYPE if each not in IN_BFLOAT16)


@pytest.mark.parametrize(
    ("type_name", "together", "dtype"),
    [
        *((each, (each,), torch.bfloat16) for each in IN_BFLOAT16),
        *((each, OTHERS, torch.float32) for each in OTHERS),
    ],
    ids=str,
)
def test_products_are_those_of_rounded_rows_and_alike_in_any_number(
    type_name: str, together: tuple[str, ...], dtype: torch.dtype
) -> None:
    """float64 has the products; only sums of float32 are rounded. 768 inputs are three chunks."""
    product, linear = products_of(together, dtype)[type_name]
    x = torch.from_numpy(rows(300, 768)).to(dtype)
    x[2] = 1  # all codes are 127, so integer sums are as large as they can be
    values = values_of(x.float().numpy())
    weight = widened(linear.panels, torch.float32).double().numpy()
    whole = product(x)
    expected = values @ weight.T + linear.bias.double().numpy()
    size = np.abs(values) @ np.abs(weight).T + linear.bias.abs().double().numpy() + 1e-6
    near = 1e-6 if dtype == torch.float32 else 5e-3
    assert float((np.abs(whole.double().numpy() - expected) / size).max()) < near
    for first, end in ((0, 1), (1, 3), (4, 9), (10, 17), (3, 11), (7, 23), (20, 160)):
        assert torch.equal(product(x[first:end]), whole[first:end]), (first, end)
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        assert torch.equal(product(x), whole)
    finally:
        torch.set_num_threads(before)


def test_formats_and_floats_that_share_an_input_are_one_product() -> None:
    """Words of two sizes need two orders of codes; floats are multiplied by rows as they are."""
    # A panel of two formats becomes floats, so the first two have whole panels.
    parts = [("Q2_K", 64), ("Q4_K", 64), ("Q8_0", 100)]
    linears = [
        LowBitLinear(panels_of(kind, random_rows(kind, count, 512)), None, torch.float32)
        for kind, count in parts
    ]
    plain = nn.Linear(512, 32, bias=False).requires_grad_(requires_grad=False)
    linears.append(in_float_panels(plain))
    module = nn.Module()
    joined = LowBitProduct(linears, LowBitWorkshop(linears, [linears]))
    module.product = joined  # type: ignore[assignment]
    assert round_activations(module, torch.float32)
    x = torch.from_numpy(rows(40, 512))
    kinds = [("float32" if each.kind.bits == 32 else "few") for each in joined.weights]
    found, at = joined(x), 0
    x_values, first = torch.from_numpy(values_of(x.numpy())), 0
    whole = torch.cat([widened(each.panels, torch.float32) for each in linears]).double()
    for kind, each in zip(kinds, joined.weights, strict=True):
        own = x.double() if kind == "float32" else x_values
        rows_NK = whole[first : first + each.num_outputs]
        expected = own @ rows_NK.T
        size = own.abs() @ rows_NK.abs().T  # a minimum and what it is taken from are larger
        part = found[:, at : at + each.num_outputs].double()
        assert float(((part - expected).abs() / size).max()) < 1e-5
        at, first = at + each.num_outputs, first + each.num_outputs
    assert {each.kind.name for each in joined.weights} == {"Q2_K", "Q4_K", "int8", "float32"}
    for count in (1, 2, 7):
        assert torch.equal(joined(x[:count]), found[:count])


# Each takes seconds to compile, for each processor. Bytes of Q8_0 are the largest, so AVX2 widens
# them; it adds products of the others in sixteen bits.
DIGESTED = ("Q8_0", "Q4_K", "Q6_K", "Q3_K", "IQ4_XS")


def digest() -> str:
    """A hash of the products of some formats, by 1 row, 7 and 40."""
    found = hashlib.sha256()
    for type_name in DIGESTED:
        panels = panels_of(type_name, random_rows(type_name, 130, 512))
        kernels = LowBits([panels.kind], torch.float32)
        rounding = rounding_of([panels.kind], torch.float32)
        products = GroupedProducts(kernels.panels([panels], None), rounding)
        x_RK = rows(40, 512)
        x_RK[1] = 1  # all codes are 127, so sums of sixteen bits are as large as they can be
        for part in (x_RK[:1], x_RK[1:2], x_RK[:7], x_RK):
            found.update(products.multiply(part).tobytes())
    return found.hexdigest()


@pytest.mark.skipif(vectors().name != "AVX-512", reason="an older processor is played by AVX-512")
@pytest.mark.long
@pytest.mark.parametrize("name", ["avx2", "sse4.2"])
def test_every_processor_has_the_same_bits(name: str) -> None:
    """VNNI, products of pairs in sixteen bits, and the older one's without fused operations."""
    module = "tests.model_runtime.layers.low_bits.test_rounded_products"
    code = f"from {module} import INSTRUCTION, digest; print(INSTRUCTION, digest())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **OLDER[name].environment},
        capture_output=True,
        text=True,
        check=True,
    )
    instruction, found = ran.stdout.split()
    assert instruction != INSTRUCTION
    assert found == digest()
