"""Layers do not compute the identity rotation; layers of other models stay as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import STEP, AttentionCall
from ropewalk.model_runtime.layers import skip_rotation
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from tests.checkpoints.tiny_models import tiny_model

ARCHITECTURES = ["llama", "cohere", "gpt_neox", "phi3", "gemma3_text", "smollm3"]
TOKENS = torch.arange(5)[None]


class Asked:
    """A step that keeps each call of a layer, and returns sums over its queries."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Keep the call; the answer [1, T, H, V] differs for other queries."""
        self.calls.append(call)
        return call.query_1HTD.transpose(1, 2).cumsum(1)


@torch.inference_mode()
def asked(model: Any) -> list[AttentionCall]:
    """The attention call of every layer."""
    step = Asked()
    model(input_ids=TOKENS, position_ids=TOKENS, use_cache=False, **{STEP: step})
    return step.calls


def spared(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward is not that of their class."""
    return [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_ask_for_the_same_without(architecture: str) -> None:
    """The same model with its class's forward, which multiplies by one, is the reference."""
    model = tiny_model(architecture)
    plans = patch_model(model, read_native_rope(model))
    layers = spared(model)
    assert len(layers) == len(plans)
    without = asked(model)
    skip_rotation.restore_rotation(layers)
    assert not spared(model)
    for call, expected in zip(without, asked(model), strict=True):
        assert torch.equal(call.query_1HTD, expected.query_1HTD)
        assert torch.equal(call.key_1KTD, expected.key_1KTD)


@torch.inference_mode()
def test_other_models_of_the_class_rotate_as_before() -> None:
    """Models of the class that exist before the patch, or are made after it, still rotate."""
    other = tiny_model("llama")
    expected = other(TOKENS).logits
    model = tiny_model("llama")
    patch_model(model, read_native_rope(model))
    assert spared(model)
    for untouched in (other, tiny_model("llama")):
        assert torch.equal(untouched(TOKENS).logits, expected)


def test_layers_that_would_ask_for_something_else_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose rotation function does more than rotate are left."""
    monkeypatch.setattr(skip_rotation, "_as_they_are", lambda q, k, *_: (2 * q, k))
    model = tiny_model("llama")
    patch_model(model, read_native_rope(model))
    assert not spared(model)


def test_a_function_of_another_kind_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name alone proves little: some of these functions rotate one tensor at a time."""
    from transformers.models.llama import modeling_llama

    def one_by_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + sin

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", one_by_one)
    assert skip_rotation.spare_rotation(tiny_model("llama").modules()) == []
