"""Which models can be divided, and the sentences for those that cannot."""

import pytest
import torch

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.parallel.plan import check_devices, plan_of
from tests.model_runtime.parallel.divided_models import DIVIDED, SHAPE, outline_of
from tests.models_page import SERVED


@pytest.mark.parametrize("architecture", sorted(set(SERVED) - set(DIVIDED) - {"emu3", "fuyu"}))
def test_other_architectures_are_refused_by_name(architecture: str) -> None:
    """The sentence names the setting, its value, the model and the part that is in the way."""
    with pytest.raises(ModelError) as refused:
        plan_of(outline_of(architecture), 2)
    told = str(refused.value)
    assert told.startswith("tensor_parallel_size 2: ")
    reasons = ("plan in transformers", "than by columns", "attention", "keep a state")
    assert any(each in told for each in reasons)


@pytest.mark.parametrize("field", ["num_attention_heads", "num_key_value_heads"])
def test_heads_that_do_not_divide_are_refused(field: str) -> None:
    """The sentence names the config's field and its number."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, field: 6}
    if field == "num_attention_heads":
        heads["num_key_value_heads"] = 2
    with pytest.raises(ModelError, match=f"has {field} 6, which is no multiple of 4"):
        plan_of(outline_of("llama", **{**heads, "hidden_size": 48}), 4)


def test_norms_with_weights_for_each_head_are_refused() -> None:
    """Cohere's optional norms have a row of weights per head, which no plan divides."""
    with pytest.raises(
        ModelError, match=r"has weights for each head \(model.layers.0.self_attn.q_norm\)"
    ):
        plan_of(outline_of("cohere", use_qk_norm=True), 2)


def test_a_gate_that_compares_a_whole_layer_is_refused() -> None:
    """Gemma 3n's first layers keep the largest values of a layer, which lie on all ranks."""
    with pytest.raises(ModelError, match="activation_sparsity_pattern"):
        plan_of(outline_of("gemma3n_text", activation_sparsity_pattern=[0.95, 0.0]), 2)


def test_a_plan_counts_the_weights_of_a_rank() -> None:
    """Linears are divided; the embedding and norms are whole."""
    plan = plan_of(outline_of("llama", tie_word_embeddings=False, vocab_size=200), 4)
    hidden, width, layers = 64, 96, SHAPE["num_hidden_layers"]
    attention, block = 2 * hidden * 64 + 2 * hidden * 32, 3 * hidden * width
    whole = 200 * hidden + (2 * layers + 1) * hidden
    assert plan.num_rank_parameters == whole + (layers * (attention + block) + 200 * hidden) // 4
    assert len(plan.parts) == 7 * layers + 1


def test_a_tied_head_is_counted_beside_the_embedding() -> None:
    """The embedding looks up rows and stays whole; the head's part is a copy."""
    tied, own = (
        plan_of(outline_of("llama", tie_word_embeddings=each, vocab_size=200), 2)
        for each in (True, False)
    )
    assert tied.num_rank_parameters == own.num_rank_parameters


def test_gpus_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank needs a GPU of its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    cuda = torch.device("cuda")
    with pytest.raises(ModelError, match="tensor_parallel_size is 2, but torch finds 1 CUDA dev"):
        check_devices(2, "cuda", cuda)
    with pytest.raises(
        ModelError, match="device cuda:1 is one GPU, tensor_parallel_size 2 needs 2"
    ):
        check_devices(2, "cuda:1", torch.device("cuda:1"))
    check_devices(1, "cuda", cuda)
    check_devices(8, "cpu", torch.device("cpu"))


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_next", "lfm2"])
def test_layers_with_states_are_the_reason_of_the_refusal(architecture: str) -> None:
    """Their projections have no plan either, but the states come first."""
    with pytest.raises(ModelError, match="layers that keep a state of each sequence"):
        plan_of(outline_of(architecture), 2)
