"""The calls and the accuracy of a patched model's layers beside attention on a CPU."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import RowProducts
from ropewalk.model_runtime.layers.fused.decoder import restore
from ropewalk.model_runtime.layers.gated_mlp import GatedMlp
from ropewalk.model_runtime.layers.merged_linear import shared_inputs
from ropewalk.model_runtime.layers.packed_product import PackedProduct
from ropewalk.model_runtime.layers.rms_norm import RmsNorm
from ropewalk.model_runtime.loading.checkpoint import prepare_model
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from ropewalk.model_runtime.runner.backends import new_store
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import NativeRope, Profile
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.tokens import byte_tokenizer

LAYERS, PROMPT = 4, 40


def answers(model: nn.Module, plans: dict[int, LayerPlan], native: NativeRope) -> list[Tensor]:
    """Logits of a prompt and of two decode steps."""
    store = new_store(plans, 4, 16, torch.float32, torch.device("cpu"))
    tables = RopeTables(native, 16, 64, torch.device("cpu"))
    runner = ModelRunner(model, plans, store, tables, 16)
    table_id = tables.id_of(Profile(native.tables[native.scaled_layer_type].scaling))
    spans = [Span(list(range(PROMPT)), 0, range(4), table_id, range(PROMPT))]
    spans += [Span([7], PROMPT + step, range(4), table_id, range(1)) for step in range(2)]
    return [runner.run([span]) for span in spans]


@pytest.mark.parametrize(
    ("architecture", "groups"),
    [
        ("llama", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
        ("qwen2", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
        ("cohere", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
        ("starcoder2", [["q_proj", "k_proj", "v_proj"]]),
        ("gpt_neox", []),
    ],
)
def test_linears_with_one_input_are_found(architecture: str, groups: list[list[str]]) -> None:
    """Hooks watch every layer once, and the model is left as it was."""
    model = tiny_model(architecture)
    patch_model(model, read_native_rope(model))
    before = [type(module) for module in model.modules()]
    found = [[name.rpartition(".")[2] for name in names] for names in shared_inputs(model)]
    assert found == groups * LAYERS
    assert [type(module) for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.sampled
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3_text", "gpt_neox"])
def test_answers_are_those_of_the_plain_layers(architecture: str) -> None:
    """The reference is the same model, patched with its own linears and norms."""
    plain = tiny_model(architecture)
    native = read_native_rope(plain)
    expected = answers(plain, dict(patch_model(plain, native)), native)
    checkpoint = prepare_model(tiny_model(architecture), byte_tokenizer(), frozenset(), {})
    restore(checkpoint.model)
    got = answers(checkpoint.model, dict(checkpoint.plans), native)
    for answer_RV, expected_RV in zip(got, expected, strict=True):
        assert float((answer_RV - expected_RV).abs().max()) < 1e-4 * float(expected_RV.std())


def test_a_decode_step_takes_so_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has four products, two norms and a gated block; the head adds a product.

    One more norm follows the last layer.
    """
    checkpoint = prepare_model(tiny_model("llama"), byte_tokenizer(), frozenset(), {})
    restore(checkpoint.model)
    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            calls[owner.__name__] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, call)

    counted(PackedProduct, "__call__")
    counted(RowProducts, "multiply")
    counted(RmsNorm, "forward")
    counted(GatedMlp, "forward")
    answers(checkpoint.model, dict(checkpoint.plans), checkpoint.native)
    steps = 3  # the prompt's, and two of one token
    # If few rows have a kernel of their own, a block calls it for both of its products.
    few = calls["RowProducts"]
    assert calls["PackedProduct"] == (4 * LAYERS + 1) * steps - (2 * LAYERS * 2 if few else 0)
    assert few in (0, (4 * LAYERS + 1) * steps)  # the prompt, 32 rows, has 8 left over
    assert calls["RmsNorm"] == (2 * LAYERS + 1) * steps
    assert calls["GatedMlp"] == LAYERS * steps
