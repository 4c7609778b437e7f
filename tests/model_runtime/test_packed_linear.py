"""Rows and numbers do not depend on what is computed beside them, to the bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from model_runtime.packed_linear import PackedLinear, RowwiseActivation, is_available, pack

pytestmark = pytest.mark.skipif(not is_available(), reason="torch without packed products")
ROWS = (1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 65, 100, 128, 257, 512)


@pytest.fixture(params=[1, 2, 3, 4, 8])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width_in", "width_out"), [(64, 96), (704, 256), (2048, 768), (3072, 1000), (1024, 3072)]
)
def test_a_row_has_the_same_bits_in_any_company(
    width_in: int, width_out: int, dtype: torch.dtype
) -> None:
    """wide inputs are where plain packed products fail"""
    linear = nn.Linear(width_in, width_out).to(dtype).requires_grad_(requires_grad=False)
    x = torch.randn(max(ROWS), width_in).to(dtype)
    packed = PackedLinear(linear)
    whole = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
        assert torch.equal(packed(x[-rows:]), whole[-rows:]), rows
    expected = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    assert float((whole.double() - expected).abs().max()) < bound


def test_shapes_are_a_linears() -> None:
    """leading dimensions are kept, no rows are no rows"""
    packed = PackedLinear(nn.Linear(8, 5, bias=False))
    assert packed(torch.randn(2, 3, 8)).shape == (2, 3, 5)
    assert packed(torch.randn(1, 0, 8)).shape == (1, 0, 5)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
@pytest.mark.parametrize("width", [36, 100, 176, 704])
def test_an_activation_has_the_same_bits_in_any_company(name: str, width: int) -> None:
    """on any number of threads, also where the width is no multiple of a vector"""
    activation = RowwiseActivation(ACT2FN[name])
    x = torch.randn(300, width)
    whole = activation(x)
    for rows in (1, 2, 3, 5, 17, 93, 299):
        assert torch.equal(activation(x[:rows]), whole[:rows]), rows
    assert torch.allclose(whole, ACT2FN[name](x), atol=1e-6)


def test_pack_replaces_linears_and_activations_everywhere() -> None:
    """and nothing else"""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.SiLU(), nn.Linear(4, 2)), nn.LayerNorm(2)
    )
    x = torch.randn(3, 4)
    expected = model(x)
    pack(model)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("PackedLinear") == 2
    assert kinds.count("RowwiseActivation") == 1
    assert torch.allclose(model(x), expected, atol=1e-6)
