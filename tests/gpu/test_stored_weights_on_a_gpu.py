"""Weights in few bits on a GPU, beside the dequantised weights: `make gpu-check`.

Twelve shapes of each format, by the product that a load chooses there and by the widened weight.
"""

import math
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import BY_TYPE
from ropewalk.model_runtime.formats.codes import Cells, Codes, packed
from ropewalk.model_runtime.formats.gguf.gguf_blocks import unpacked
from ropewalk.model_runtime.layers.low_bits.executors import (
    choose_products,
    fp8_fault,
    multiplies_blocks,
    round_to_fp8,
)
from ropewalk.model_runtime.layers.low_bits.stored import StoredExperts, StoredLinear
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.low_bits.codes import blocks_as_codes
from ropewalk.model_runtime.runner.cuda_graphs import cuda_recorder
from tests.checkpoints.quantised_cases import case
from tests.checkpoints.random_blocks import random_rows
from tests.doubles.engines import EngineFactory, answer, deployment_of, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
GPU = torch.device("cuda")
# Outputs and inputs; the largest are those of an 8B model.
SHAPES = [
    *((64, 64), (64, 256), (128, 128), (192, 512), (256, 1024), (576, 576)),
    *((1024, 2048), (1536, 576), (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)),
]
ROWS = (1, 8, 64, 512)
_FP8 = torch.float8_e4m3fn


def integers(shape: tuple[int, int], bits: int, group: int, *, has_zeros: bool) -> Codes:
    """Random codes with scales for each group."""
    num_outputs, num_inputs = shape
    draw = torch.Generator().manual_seed(num_outputs + num_inputs)
    group = math.gcd(group, num_inputs)  # groups are whole
    cells = num_outputs, num_inputs // group
    codes = torch.randint(1 << bits, shape, generator=draw, dtype=torch.uint8)
    scale = (torch.rand(cells, generator=draw) * 0.01 + 0.001).half()
    zero: Cells | int = 1 << (bits - 1)
    if has_zeros:
        found = torch.randint(1 << bits, cells, generator=draw, dtype=torch.uint8)
        zero = Cells(found.to(GPU), 1, group)
    lower = packed(codes, bits).to(GPU)
    name = f"int{bits} in groups of {group}"
    return Codes(name, bits, *shape, lower, (Cells(scale.to(GPU), 1, group),), zero=zero)


def floats(shape: tuple[int, int], rows: int, columns: int) -> Codes:
    """Random FP8 with scales for rectangles."""
    draw = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=draw).to(_FP8)
    cells = -(-shape[0] // rows) if rows else 1, -(-shape[1] // columns) if columns else 1
    scale = torch.rand(cells, generator=draw) * 0.01 + 0.001
    return Codes("fp8", 8, *shape, values.to(GPU), (Cells(scale.to(GPU), rows, columns),))


def blocks(shape: tuple[int, int], type_name: str) -> Codes:
    """Random blocks of a type of GGUF."""
    kind = BY_TYPE[type_name]
    if shape[1] % kind.block:
        shape = shape[0], 256
    rows = random_rows(type_name, *shape)
    return blocks_as_codes(kind, shape, [(0, unpacked(rows, type_name))], GPU)


FORMATS = {
    "int4": lambda shape: integers(shape, 4, 128, has_zeros=False),
    "int4-zeros": lambda shape: integers(shape, 4, 64, has_zeros=True),
    "int8": lambda shape: integers(shape, 8, 128, has_zeros=False),
    "fp8-tensor": lambda shape: floats(shape, 0, 0),
    "fp8-rows": lambda shape: floats(shape, 1, 0),
    "fp8-blocks": lambda shape: floats(shape, 128, 128),
    **{
        name: (lambda shape, name=name: blocks(shape, name))
        for name in ("Q4_K", "Q6_K", "Q8_0", "MXFP4")
    },
}


def error(found: Tensor, expected: Tensor) -> float:
    """The distance of a product, relative to it."""
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dequantised_weight(name: str) -> None:
    """In bfloat16, against float64 by the weight that the CPU widens."""
    for shape in SHAPES:
        codes = FORMATS[name](shape)
        weight = codes.each(Tensor.cpu).widened(torch.float32).to(GPU).double()
        module = StoredLinear(codes, None, torch.bfloat16)
        choose_products(nn.Sequential(module))
        for num_rows in ROWS:
            x = torch.randn(num_rows, codes.num_inputs, device=GPU, dtype=torch.bfloat16)
            assert error(module(x), x.double() @ weight.t()) < 0.01, (
                shape,
                num_rows,
                module.product_name,
            )


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-rows", "fp8-blocks"])
def test_rows_in_fp8(name: str) -> None:
    """Rows that are rounded to FP8 come near, on cards that multiply it, for any number of them."""
    if fp8_fault(GPU) is not None:
        pytest.skip(str(fp8_fault(GPU)))
    if name == "fp8-blocks" and not multiplies_blocks(GPU):
        pytest.skip("torch multiplies blocks of FP8 on Hopper only")
    for shape in SHAPES:
        if name == "fp8-blocks" and shape[1] % 128:
            continue
        codes = FORMATS[name](shape)
        module = StoredLinear(codes, None, torch.bfloat16)
        assert round_to_fp8(nn.Sequential(module)), shape
        weight = codes.widened(torch.float32).double()
        for num_rows in (1, 3, 64, 513):
            x = torch.randn(num_rows, codes.num_inputs, device=GPU, dtype=torch.bfloat16)
            assert error(module(x), x.double() @ weight.t()) < 0.08, (shape, num_rows)


@pytest.mark.parametrize("name", ["awq", "gptq-ordered", "fp8-blocks", "fp8-experts"])
def test_a_model_is_served_from_its_file_bytes(
    name: str, engines: EngineFactory, tmp_path: Path
) -> None:
    """Captured steps and queued ones give the tokens of the dequantised model."""
    folder = case(name).write(tmp_path / "quantised").folder
    prompt = list(range(40, 52))
    tokens = []
    for weights, eager in (("stored", False), ("stored", True), ("dequantised", False)):
        checkpoint = load_checkpoint(folder, dtype="float32", device="cuda", weights=weights)
        kinds = StoredLinear | StoredExperts
        assert any(isinstance(each, kinds) for each in checkpoint.model.modules()) == (
            weights == "stored"
        )
        engine = engines.over(checkpoint, enforce_eager=eager)
        asked = request(deployment_of(checkpoint), prompt, max_tokens=12, ignore_eos=True)
        tokens.append(answer(engine, asked)[0].token_ids)
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("num_rows", [1, 24, 600])
def test_captured_experts_are_the_dequantised_ones(num_rows: int, tmp_path: Path) -> None:
    """A replay has the routes of its own rows, by the library or by widened weights."""
    folder = case("fp8-experts").write(tmp_path / "quantised").folder
    stored, plain = (
        load_checkpoint(folder, dtype="bfloat16", device="cuda", weights=weights)
        .model.get_submodule("model.layers.0.mlp")
        .experts
        for weights in ("stored", "dequantised")
    )
    is_waiting = torch.cuda.get_device_capability(GPU)[0] not in (9, 10)
    if num_rows == 600 and is_waiting and not stored.product_name:
        pytest.skip("torch 2.13 reads the routes of a grouped product on the host")
    num_inputs = stored.matrices["down_proj"][0].num_outputs

    def drawn() -> tuple[Tensor, Tensor, Tensor]:
        x_RK = torch.randn(num_rows, num_inputs, device=GPU, dtype=torch.bfloat16)
        share_RC, choice_RC = torch.rand(num_rows, stored.num_experts, device=GPU).topk(2)
        return x_RK, choice_RC, share_RC.bfloat16()

    inputs = drawn()
    with torch.inference_mode():
        found_RK, replay = cuda_recorder(GPU)(lambda: stored(*inputs))
        for _ in range(2):
            for old, new in zip(inputs, drawn(), strict=True):
                old.copy_(new)
            replay()
            assert error(found_RK, plain(*inputs).double()) < 0.02


def test_all_types_of_gguf_are_in_the_checks() -> None:
    """Each type that a CPU keeps widens on a GPU to the CPU's numbers, to the bit."""
    for name in BY_TYPE:
        assert name in Type.__members__
        codes = blocks((128, 512), name)
        expected = codes.each(Tensor.cpu).widened(torch.float32)
        assert torch.equal(codes.widened(torch.float32).cpu(), expected), name
