"""Compiled activations answer like torch's in float64, wherever a value stands."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from ropewalk.model_runtime.cpu_kernels.activations import (
    GELU_ERF,
    GELU_TANH,
    KINDS,
    SIGMOID,
    SILU,
    SQUARED_RELU,
)
from ropewalk.model_runtime.cpu_kernels.elementwise import activated
from ropewalk.model_runtime.layers.packed_linear import kind_of

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
