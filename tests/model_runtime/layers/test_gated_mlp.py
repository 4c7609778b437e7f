"""Gated blocks in one pass answer like the model's own, whatever rows share the pass."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ropewalk.model_runtime.cpu_kernels.activations import (
    GELU_ERF,
    GELU_TANH,
    KINDS,
    SIGMOID,
    SILU,
    SQUARED_RELU,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import activated, gated
from ropewalk.model_runtime.layers import packed_linear
from ropewalk.model_runtime.layers.gated_mlp import GatedMlp, fuse
from ropewalk.model_runtime.layers.merged_linear import shared_inputs
from ropewalk.model_runtime.layers.packed_linear import kind_of
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from tests.checkpoints.tiny_models import tiny_model


def exact(both: Tensor) -> Tensor:
    """silu(first half) * second half in float64."""
    gate, up = both.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_the_pass_equals_float64(scale: float) -> None:
    """The gated pass differs from float64 by float32's rounding, near zero and far from it."""
    both = torch.randn(33, 2 * 176) * scale
    got = torch.from_numpy(gated(both.numpy()))
    torch.testing.assert_close(got.double(), exact(both), rtol=1e-6, atol=1e-30)


ACTIVATIONS = {
    SILU: lambda x: x / (1 + (-x).exp()),
    GELU_TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
    GELU_ERF: nn.functional.gelu,
    SQUARED_RELU: lambda x: x.relu().square(),
    SIGMOID: torch.sigmoid,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_activations_equal_float64(kind: int, scale: float) -> None:
    """The reference is torch in float64; near zero and above it float32's rounding is the bound."""
    x = torch.randn(70_001) * scale
    got = torch.from_numpy(activated(x.numpy(), kind)).double()
    exact = ACTIVATIONS[kind](x.double())
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=3e-7)
    sure = x > 0
    torch.testing.assert_close(got[sure], exact[sure], rtol=5e-7, atol=1e-30)


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_has_the_same_bits_at_any_place(kind: int) -> None:
    """A value may stand in a whole register, or at the end of a row of any length."""
    x = torch.randn(9_000).numpy()
    whole = activated(x, kind)
    for begin, end in ((0, 1), (7, 40), (4_090, 4_103), (1, 9_000)):
        assert np.array_equal(activated(x[begin:end].copy(), kind), whole[begin:end])


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_keeps_the_ends_of_the_range(kind: int) -> None:
    """The largest numbers stay numbers or overflow, the least become zero, and NaN is kept."""
    x = torch.tensor([1e4, -1e4, 3e38, -3e38, torch.nan, 0.0, -0.0])
    got = torch.from_numpy(activated(x.numpy(), kind))
    exact = ACTIVATIONS[kind](x.double()).float()
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_the_activation_is_found_by_its_outputs() -> None:
    """Both forms of gelu and the square of relu are found, and others are torch's."""
    names = ("silu", "swish", "gelu", "gelu_new", "relu2", "sigmoid")
    found = [kind_of(ACT2FN[name]) for name in names]
    assert found == [SILU, SILU, GELU_ERF, GELU_TANH, SQUARED_RELU, SIGMOID]
    assert {kind_of(ACT2FN[name]) for name in ("quick_gelu", "relu", "tanh")} == {None}


def test_large_numbers_and_nan_pass() -> None:
    """Large positive gates stay, large negative ones become zero, and NaN is kept."""
    gate = torch.tensor([1e4, -1e4, 88.0, -88.0, 3e38, -3e38, torch.nan, 0.0] * 2)
    got = torch.from_numpy(gated(torch.cat((gate, torch.ones(16)))[None].numpy()))[0]
    assert got[[0, 2, 4]].tolist() == gate[[0, 2, 4]].tolist()
    assert got[[1, 3, 5, 7]].abs().max() < 1e-30
    assert got[6].isnan()


def test_bf16_is_rounded_once() -> None:
    """The gated pass gives the bfloat16 nearest to the float32 result."""
    both = torch.randn(5, 64).bfloat16()
    bits = gated(both.view(torch.uint16).numpy())
    got = torch.from_numpy(bits).view(torch.bfloat16)
    assert torch.equal(got, exact(both).float().bfloat16())


def test_threads_share_rows() -> None:
    """Rows have the same bits whether there are more rows than threads or fewer."""
    for num_rows in (1, 3, 700):
        both = torch.randn(num_rows, 2 * 704).numpy()
        before = torch.get_num_threads()
        answers = []
        try:
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                answers.append(gated(both))
        finally:
            torch.set_num_threads(before)
        assert np.array_equal(*answers)


def packed(architecture: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny model packed but not fused, and the same fused."""
    models = []
    for is_fused in (False, True):
        model = tiny_model(architecture)
        for parameter in model.parameters():  # not the rotary tables
            parameter.data = parameter.data.to(dtype)
        patch_model(model, read_native_rope(model))
        packed_linear.pack(model, shared_inputs(model))
        if is_fused:
            fuse(model)
        models.append(model)
    return models[0], models[1]


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The gated block of each layer."""
    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            yield module


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "phi3", "glm4"])
def test_blocks_answer_as_before(architecture: str, dtype: torch.dtype) -> None:
    """Answers agree to rounding; a row has the same bits alone, in a decode and in a prompt."""
    before, after = packed(architecture, dtype)
    pairs = list(zip(blocks(before), blocks(after), strict=True))
    assert pairs
    for old, new in pairs:
        assert isinstance(new, GatedMlp)
        assert not isinstance(old, GatedMlp)
        x = torch.randn(1, 45, before.config.hidden_size, dtype=dtype)
        with torch.inference_mode():
            whole = new(x)
            expected = old(x).float()
            apart = (whole.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert float(apart.max()) < (1e-6 if dtype == torch.float32 else 1e-2)
            for begin, end in ((0, 0), (0, 1), (1, 9), (9, 45)):
                assert torch.equal(new(x[:, begin:end]), whole[:, begin:end])


def test_another_activation_is_left() -> None:
    """Apertus has an activation with parameters, and no gate."""
    _, after = packed("apertus", torch.float32)
    assert not any(isinstance(block, GatedMlp) for block in blocks(after))
