"""The calls and the accuracy of a patched model's layers beside attention on a CPU."""

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.layers.fused.decoder import restore
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
    store = new_store(CacheLayout(plans, torch.float32, 16), 4, torch.device("cpu"))
    tables = RopeTables(native, 16, 64, torch.device("cpu"))
    runner = ModelRunner(model, plans, store, tables, 16)
    table_id = tables.id_of(Profile(native.tables[native.scaled_layer_type].scaling))
    spans = [Span(list(range(PROMPT)), 0, range(4), table_id, range(PROMPT))]
    spans += [Span([7], PROMPT + step, range(4), table_id, range(1)) for step in range(2)]
    return [runner.run([span]) for span in spans]


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
