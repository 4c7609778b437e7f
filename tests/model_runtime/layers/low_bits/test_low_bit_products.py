"""Products of weights in few bits: their values, and the same bits in any number of rows."""

from functools import cache

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels import skinny_gemm
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import BY_TYPE, FORMATS, INT8
from ropewalk.model_runtime.cpu_kernels.low_bits.panels import (
    LowBitPanels,
    PanelWriter,
    Parts,
    gathered,
    int8_parts,
    widened,
)
from ropewalk.model_runtime.cpu_kernels.trials import multiplies_pairs
from ropewalk.model_runtime.formats.gguf.gguf_blocks import UNPACKED, unpacked
from ropewalk.model_runtime.layers.low_bits.modules import LowBitLinear, in_float_panels
from ropewalk.model_runtime.layers.low_bits.product import LowBitProduct, LowBitWorkshop
from ropewalk.model_runtime.layers.packed_linear import PackedLinear
from ropewalk.model_runtime.layers.packed_product import PackedProduct, Way, Workshop
from tests.checkpoints.random_blocks import random_rows

ROWS = (*range(1, 65), 512)


def panels_of(type_name: str, rows: np.ndarray) -> LowBitPanels:
    """The panels of rows of a type."""
    parts = Parts(BY_TYPE[type_name], *unpacked(rows, type_name))
    writer = PanelWriter(BY_TYPE[type_name], *parts.q_NK.shape)
    writer.write(0, parts)
    return writer.panels


def int8_panels(weight_NK: Tensor) -> LowBitPanels:
    """The panels of a quantised weight."""
    writer = PanelWriter(INT8, *weight_NK.shape)
    writer.write(0, int8_parts(weight_NK))
    return writer.panels


def test_the_formats_are_the_types_that_are_unpacked() -> None:
    """Each type has a format, and each format a number of its own."""
    assert set(BY_TYPE) == set(UNPACKED)
    assert [kind.number for kind in FORMATS] == list(range(len(FORMATS)))


@pytest.mark.parametrize("type_name", UNPACKED)
def test_widened_weights_are_those_of_ggufs_own_package(type_name: str) -> None:
    """Rows are no multiple of a panel; bfloat16 is rounded once, from float32."""
    rows = random_rows(type_name, 200, 512)
    if type_name == "MXFP4":  # all exponents of finite weights
        rows.reshape(-1, 17)[:, 0] = np.arange(rows.size // 17) % 253
    panels = panels_of(type_name, rows)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, Type[type_name]))
    assert torch.equal(widened(panels, torch.float32), expected)
    # Processors with AVX512_BF16 round numbers below the normal ones to zero.
    is_normal = expected.abs() >= torch.finfo(torch.float32).tiny
    rounded = widened(panels, torch.bfloat16)
    assert torch.equal(rounded[is_normal], expected[is_normal].bfloat16())
    ids = np.array([199, 0, 63, 64, 7, 7])
    assert torch.equal(gathered(panels, ids, torch.float32), expected[ids])


@pytest.mark.parametrize(
    ("type_name", "bits"),
    [
        *[("Q8_0", 8.5), ("Q4_0", 4.5), ("Q4_1", 5), ("Q5_0", 5.5), ("Q5_1", 6)],
        *[("Q2_K", 2.625), ("Q3_K", 3.5625), ("Q4_K", 4.625), ("Q5_K", 5.625), ("Q6_K", 6.5625)],
        *[("IQ4_NL", 4.5), ("IQ4_XS", 4.3125), ("MXFP4", 4.25)],
    ],
)
def test_a_weight_takes_the_bits_of_its_file(type_name: str, bits: float) -> None:
    """K types take up to an eighth of a bit more, because scales are whole bytes."""
    kind = BY_TYPE[type_name]
    panels = PanelWriter(kind, 128, 1024).panels
    assert panels.memory.nbytes * 8 / (128 * 1024) == bits
    assert kind.num_bytes(128, 1024) == panels.memory.nbytes
    in_file = gguf.GGML_QUANT_SIZES[Type[type_name]]
    assert bits - in_file[1] * 8 / in_file[0] <= 0.125


def test_int8_rounds_the_scale_first_and_then_to_the_nearest_even() -> None:
    """Each weight is at most half a step of the rounded scale from its float, or clipped."""
    weight_NK = torch.randn(70, 96, generator=torch.manual_seed(0))
    weight_NK[3, :32] = 0
    weight_NK[4, 32:64] = 1e-9  # its scale is 0 in float16
    found_NK = widened(int8_panels(weight_NK), torch.float32)
    scale_NG = (weight_NK.view(70, 3, 32).abs().amax(2) / 127).half().float()
    step_NK = scale_NG.repeat_interleave(32, 1)
    whole_NK = torch.where(step_NK > 0, weight_NK / step_NK, 0.0).round().clamp(-127, 127)
    assert torch.equal(found_NK, whole_NK * step_NK)


def linear_of(
    type_name: str, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> LowBitLinear:
    """A linear with random blocks and a bias."""
    panels = panels_of(type_name, random_rows(type_name, num_outputs, num_inputs))
    bias = torch.randn(num_outputs, generator=torch.manual_seed(1)).to(dtype)
    return LowBitLinear(panels, bias, dtype)


@cache
def workshop_of(dtype: torch.dtype) -> LowBitWorkshop:
    """The kernels of all types, as of a model that has each; one product of them is compiled."""
    return LowBitWorkshop([linear_of(each, 64, 256, dtype) for each in BY_TYPE])


# A type's kernels take seconds to compile. Those of bfloat16 differ by how rows and results are
# read, so the single numbers below and three of these types suffice there.
@pytest.mark.parametrize(
    ("type_name", "num_outputs", "num_inputs", "dtype"),
    [
        ("Q8_0", 200, 1056, torch.float32),  # inputs of a chunk that is not whole
        ("Q4_0", 64, 96, torch.float32),
        ("Q4_1", 1000, 2080, torch.bfloat16),
        ("Q5_0", 64, 160, torch.float32),
        ("Q5_1", 70, 96, torch.float32),
        ("Q2_K", 129, 512, torch.float32),
        ("Q3_K", 64, 768, torch.float32),
        ("Q4_K", 130, 1280, torch.bfloat16),
        ("Q5_K", 128, 512, torch.float32),
        ("Q6_K", 129, 768, torch.float32),
        ("IQ4_NL", 100, 160, torch.bfloat16),
        ("IQ4_XS", 64, 512, torch.float32),
        ("MXFP4", 65, 96, torch.float32),
    ],
)
def test_rows_have_the_bits_of_the_float_product_in_any_number(
    type_name: str, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    """The float product is this project's over the widened weight, and float64's is near.

    A processor that multiplies bfloat16 in pairs has other sums, which are as near.
    """
    low = linear_of(type_name, num_outputs, num_inputs, dtype)
    x = torch.randn(max(ROWS), num_inputs, generator=torch.manual_seed(2)).to(dtype)
    packed = LowBitProduct([low], workshop_of(dtype))
    whole = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
    weight = widened(low.panels, torch.float32)
    plain = nn.Linear(num_inputs, num_outputs).requires_grad_(requires_grad=False)
    plain.weight.copy_(weight)
    plain.bias.copy_(low.bias.float())
    if not multiplies_pairs(dtype):
        assert torch.equal(whole, PackedLinear(plain)(x.float()).to(dtype))
    expected = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double())
    rounding = 0.0 if dtype == torch.float32 else 2**-8  # half a unit of bfloat16
    size = float((x.double().abs() @ plain.weight.double().abs().T).max())
    bound = rounding * expected.abs() + 1e-6 * size
    assert bool(((whole.double() - expected).abs() <= bound).all())
    # Rounding each weight to bfloat16 would change about half of the outputs.
    assert float((whole == expected.to(dtype)).float().mean()) > 0.97 or dtype == torch.float32
    # torch rounds the product before it adds the bias.
    assert bool(((low(x).double() - expected).abs() <= 2 * bound + rounding * 4).all())


# If bfloat16 is not multiplied in pairs, its weights are widened as those of float32 are.
IN_PAIRS = sorted(BY_TYPE) if multiplies_pairs(torch.bfloat16) else ["Q4_1", "Q4_K", "IQ4_NL"]


@pytest.mark.parametrize("type_name", IN_PAIRS)
def test_a_single_number_of_a_bfloat16_row_finds_its_weight(type_name: str) -> None:
    """Each input has its own place in the order of pairs, in any number of rows."""
    num_inputs = max(BY_TYPE[type_name].block, 96)
    low = linear_of(type_name, 64, num_inputs, torch.bfloat16)
    low.bias = None
    packed = LowBitProduct([low], workshop_of(torch.bfloat16))
    rows = torch.eye(num_inputs, dtype=torch.bfloat16)
    found = packed(rows)
    expected = widened(low.panels, torch.float32).T
    # A weight of a format with minima is the sum of two rounded products here.
    assert torch.allclose(
        found.float(), expected, rtol=2**-8, atol=1e-6 * float(expected.abs().max())
    )
    for first in range(0, num_inputs, 7):
        assert torch.equal(packed(rows[first : first + 1]), found[first : first + 1])


@pytest.mark.long
@pytest.mark.parametrize(
    "parts",
    [
        (("Q4_K", 128), ("Q4_K", 64), ("Q6_K", 96)),  # Llama's values often have more bits
        (("Q3_K", 100), ("Q3_K", 60), ("IQ4_XS", 96)),  # rows move, and one panel has two formats
        (("Q2_K", 32), ("float32", 32), ("Q2_K", 200)),
    ],
)
def test_linears_of_several_formats_are_one_product(parts: tuple[tuple[str, int], ...]) -> None:
    """Their outputs need not be multiples of a panel, and some may be floats."""
    linears = []
    for seed, (kind, num_outputs) in enumerate(parts):
        if kind == "float32":
            weight = nn.Linear(512, num_outputs).requires_grad_(requires_grad=False)
            linears.append(in_float_panels(weight))
            continue
        panels = panels_of(kind, random_rows(kind, num_outputs, 512, seed))
        linears.append(LowBitLinear(panels, None, torch.float32))
    joined = LowBitProduct(linears, LowBitWorkshop(linears, [linears]))
    x = torch.randn(40, 512, generator=torch.manual_seed(0))
    expected = torch.cat([PackedLinear(each)(x) for each in linears], dim=-1)
    assert torch.equal(joined(x), expected)
    assert torch.equal(joined(x[:3]), expected[:3])
    assert torch.equal(joined(x[:1]), expected[:1])


def test_without_onednn_rows_have_the_bits_of_the_float_product() -> None:
    """A sum is then one chain over all inputs."""
    low = linear_of("Q8_0", 200, 1056, torch.float32)
    plain = nn.Linear(1056, 200).requires_grad_(requires_grad=False)
    plain.weight.copy_(widened(low.panels, torch.float32))
    plain.bias.copy_(low.bias)
    workshop = LowBitWorkshop([low])
    workshop.has_onednn = False
    x = torch.randn(100, 1056, generator=torch.manual_seed(0))
    found = LowBitProduct([low], workshop)(x)
    assert torch.equal(found, PackedProduct([plain], Workshop(Way.OWN))(x))


@pytest.mark.parametrize("num_rows", [1, 16, 300])
def test_threads_that_take_parts_of_a_product_change_no_bit(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product this small would be one part otherwise."""
    low = linear_of("Q4_K", 300, 512, torch.float32)
    x = torch.randn(num_rows, 512, generator=torch.manual_seed(0))
    product = LowBitProduct([low], LowBitWorkshop([low]))
    alone = product(x)
    monkeypatch.setattr(skinny_gemm, "_WORK_PER_THREAD", 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(product(x), alone)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("tile", [4, 6])
@pytest.mark.parametrize("num_threads", [2, 16, 64])
@pytest.mark.parametrize("num_rows", [1, 8, 17, 64, 256, 512, 2048])
@pytest.mark.parametrize("num_panels", [9, 32, 176, 500])
def test_parts_suffice_for_all_threads_and_are_not_needlessly_small(
    monkeypatch: pytest.MonkeyPatch, tile: int, num_threads: int, num_rows: int, num_panels: int
) -> None:
    """Each thread has four parts, unless they would have one panel and fewer than 16 rows.

    A part is one pass over its panels, because each pass widens them anew.
    """
    monkeypatch.setattr(skinny_gemm, "_TILES", ((tile, 2), (2, 4), (1, 8)))
    rows, panels = skinny_gemm.part_sizes(num_rows, num_panels, num_threads)
    assert skinny_gemm.block_rows(rows) == rows
    blocks = -(-num_rows // rows)
    num_parts = blocks * -(-num_panels // panels)
    is_smallest = panels == 1 and num_rows / blocks < 2 * 16
    assert num_parts >= 3 * num_threads or is_smallest
    assert num_parts <= 9 * num_threads or rows >= 252
