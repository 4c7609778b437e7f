"""The network is transformers' own, the planted circuit copies, and Muon's steps are orthogonal."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from training.export import save_model
from training.induction import plant_induction
from training.network import Network
from training.optimizer import orthogonal
from training.shape import Shape


def _shaken(network: Network) -> None:
    """Move every parameter, so that no weight is zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_losses_are_those_of_transformers(tmp_path: Path, shape: Shape, *, qkv_bias: bool) -> None:
    """The model is Qwen2 with biases and Llama without; the bound is bfloat16's rounding."""
    torch.manual_seed(0)
    network = Network(replace(shape, qkv_bias=qkv_bias))
    _shaken(network)
    save_model(network, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, shape.vocab, (2, 65))
    with torch.no_grad():
        ours = network(tokens[:, :-1], tokens[:, 1:])
        logits = model(tokens[:, :-1]).logits
    theirs = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    assert model.config.model_type == ("qwen2" if qkv_bias else "llama")
    assert float((ours - theirs).abs().mean()) < 0.02
    assert float(theirs.std()) > 0.5, "a model that says nothing would agree, too"


def test_the_planted_circuit_copies_before_any_training() -> None:
    """The second copy of a random segment is likelier by a tenth of a nat per token."""
    shape = Shape()
    torch.manual_seed(0)
    bare, planted = Network(shape), Network(shape)
    plant_induction(planted, seed=0)
    assert _gain_of_a_second_copy(planted) > 0.1
    assert abs(_gain_of_a_second_copy(bare)) < 0.03


@torch.no_grad()
def _gain_of_a_second_copy(network: Network) -> float:
    """Nats per token, over eight random segments of 100 tokens."""
    segments = torch.stack([torch.randperm(network.shape.vocab)[:100] for _ in range(8)])
    tokens = torch.cat([segments, segments], dim=1)
    losses = network(tokens[:, :-1], tokens[:, 1:])
    return float(losses[:, :99].mean() - losses[:, 100:].mean())


def test_steps_are_nearly_orthogonal() -> None:
    """Singular values are between 0.5 and 1.3, for wide and tall gradients."""
    torch.manual_seed(0)
    for rows, columns in ((48, 32), (32, 48)):
        gradient = torch.randn(rows, columns)
        step = orthogonal(gradient)
        values = torch.linalg.svdvals(step)
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.3
        u, _, v = torch.linalg.svd(gradient, full_matrices=False)
        nearest = u @ v
        cosine = functional.cosine_similarity(step.flatten(), nearest.flatten(), dim=0)
        assert float(cosine) > 0.95
