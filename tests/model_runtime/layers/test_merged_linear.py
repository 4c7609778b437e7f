"""A merged linear, which multiplies one input once, answers like its separate linears."""

import pytest
import torch
from torch import nn

from ropewalk.model_runtime.layers.merged_linear import MergedPart, join, shared_inputs
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from tests.checkpoints.tiny_models import tiny_model


class Halves(nn.Module):
    """Two linears of one input, one of them with a bias, and one of another input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.second = nn.Linear(12, 20, bias=False)
        self.third = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call all of them."""
        return torch.cat((self.first(x), self.second(x), self.third(x + 1)), dim=-1)


def test_parts_answer_as_their_linears() -> None:
    """One part has a bias; a second input follows, because the first one may be forgotten."""
    model = Halves()
    inputs = [torch.randn(1, 5, 12), torch.randn(3, 12)]
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
        join(model, [["first", "second"]])
        for x, answer in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(x), answer)
    assert isinstance(model.first, MergedPart)
    assert type(model.third) is nn.Linear


def test_a_weight_that_two_share_is_left() -> None:
    """A merge would copy a shared weight and so cost its memory again."""
    model = Halves()
    model.first = nn.Linear(12, 20)
    model.first.weight = model.second.weight
    join(model, [["first", "second"]])
    assert type(model.first) is nn.Linear


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gemma2"])
def test_a_model_answers_as_before(architecture: str) -> None:
    """Queries, keys and values merge, as do gate and up; no weight is held twice."""
    model = tiny_model(architecture)
    num_weights = sum(weight.numel() for weight in model.parameters())
    patch_model(model, read_native_rope(model))
    groups = shared_inputs(model)
    assert groups
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    x = torch.randn(1, 3, linears[0].in_features)
    layer = model.model.layers[0]
    with torch.inference_mode():
        before = layer.self_attn.q_proj(x), layer.self_attn.k_proj(x), layer.mlp(x)
        join(model, groups)
        after = layer.self_attn.q_proj(x), layer.self_attn.k_proj(x), layer.mlp(x)
    for got, expected in zip(after, before, strict=True):
        torch.testing.assert_close(got, expected)
    assert sum(isinstance(each, MergedPart) for each in model.modules()) == sum(map(len, groups))
    held = sum(weight.numel() for weight in model.parameters() if weight.device.type != "meta")
    assert held < num_weights
