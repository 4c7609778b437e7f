"""Weights in few bits with exact_batches have the bits of the dequantised weights; interpreted."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.formats.codes import Cells, Codes, packed
from ropewalk.model_runtime.gpu.exact import product
from ropewalk.model_runtime.gpu.exact.forward import _weights_of
from ropewalk.model_runtime.gpu.exact.mixtures import ExactExperts
from ropewalk.model_runtime.gpu.launch import is_interpreted
from ropewalk.model_runtime.layers.low_bits.stored import StoredExperts, StoredLinear
from tests.checkpoints.tiny_models import tiny_model
from tests.oracles.triton_attention import exact_products, small_sizes

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="tests/gpu serves compiled kernels")
GROUP = 32  # inputs of a scale


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few numbers are widened at a time, so that weights and experts have several pieces."""
    exact_products(monkeypatch)
    small_sizes(monkeypatch)
    monkeypatch.setattr(product, "_AT_ONCE", 1 << 13)


def codes(*shape: int, order: Tensor | None = None) -> Codes:
    """Random int4 of outputs, or of experts with outputs, in groups of inputs."""
    *before, num_outputs, num_inputs = shape
    lower = packed(torch.randint(16, shape, dtype=torch.uint8), 4)
    scale = torch.rand(*before, num_outputs, num_inputs // GROUP) * 0.1 + 0.01
    cells = (Cells(scale.half(), 1, GROUP),)
    return Codes("int4", 4, num_outputs, num_inputs, lower, cells, zero=8, order=order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linears_have_the_bits_of_the_dequantised_weight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three as one product, one of floats, one whose inputs have an order of their own."""
    torch.manual_seed(1)
    # A piece alone would have other parts than all outputs.
    monkeypatch.setattr(product, "num_parts", lambda num_outputs, _: 2 if num_outputs > 40 else 1)
    order = torch.randperm(512)
    first, last = codes(40, 512, order=order), codes(20, 512)
    modules = (
        StoredLinear(first, torch.randn(40).to(dtype), dtype),
        nn.Linear(512, 10).to(dtype),
        StoredLinear(last, None, dtype),
    )
    weights, bias_N = _weights_of(modules)
    ordered = torch.empty(40, 512, dtype=dtype)
    ordered[:, order] = first.widened(dtype)
    floats = [ordered, modules[1].weight.detach(), last.widened(dtype)]
    for num_rows in (1, 17, 65, 131):  # in each form of a program, with parts apart and together
        x_RK = torch.randn(num_rows, 512).to(dtype)
        got_RN = x_RK.new_empty(num_rows, 70)
        product.multiply_into(got_RN, x_RK, weights, bias_N)
        assert torch.equal(got_RN, product.product_of(x_RK, torch.cat(floats), bias_N))
    assert product.find_fault([(weights, bias_N)], x_RK) is None


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_have_the_bits_of_the_dequantised_weights(name: str) -> None:
    """Gates and ups apart, and a matrix with both and with biases; few rows, and many."""
    torch.manual_seed(2)
    model: Any = tiny_model(name, hidden_size=64, intermediate_size=64)
    experts: Any = next(each for each in model.modules() if hasattr(each, "has_gate"))
    num_experts, matrices = len(experts.down_proj), {}
    for matrix, num_outputs in (("gate_up_proj", 128), ("down_proj", 64)):
        is_split = name == "mixtral" and matrix == "gate_up_proj"
        sizes = (64, 64) if is_split else (num_outputs,)
        matrices[matrix] = tuple(codes(num_experts, each, 64) for each in sizes)
    stored = ExactExperts(StoredExperts(copy.deepcopy(experts), matrices))
    for matrix, parts in matrices.items():
        weight_ENK = torch.cat([each.widened(torch.float32) for each in parts], dim=1)
        is_transposed = experts.is_transposed
        getattr(experts, matrix).data = weight_ENK.mT.clone() if is_transposed else weight_ENK
    exact = ExactExperts(experts)
    for num_rows in (1, 2, 37):
        x_RK, weight_RC = torch.randn(num_rows, 64), torch.rand(num_rows, 2)
        index_RC = torch.randn(num_rows, num_experts).topk(2).indices
        with torch.inference_mode():
            got_RK = stored(x_RK, index_RC, weight_RC)
            assert torch.equal(got_RK, exact(x_RK, index_RC, weight_RC))
    assert stored.find_fault(x_RK) is None
