"""Statistics of queries and keys against the projections of an untouched model."""

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.studies.inspection.head_statistics import head_statistics, sequence_len
from tests.checkpoints.tiny_models import VOCAB_SIZE, tiny_model
from tests.doubles.engines import checkpoint_of, tiny_checkpoint

_SEEDED = torch.Generator().manual_seed(0)
SEQUENCES = [
    torch.randint(VOCAB_SIZE, (length,), generator=_SEEDED).tolist() for length in (40, 17, 64)
]


def _hooked(model: nn.Module) -> dict[tuple[int, str], list[Tensor]]:
    """(layer, projection) -> its output for each sequence, [T, heads * D]."""
    said: dict[tuple[int, str], list[Tensor]] = {}
    handles = []
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr,arg-type]
        for name in ("q_proj", "k_proj"):
            rows = said.setdefault((index, name), [])
            handles.append(
                getattr(layer.self_attn, name).register_forward_hook(
                    lambda _module, _inputs, output, rows=rows: rows.append(output[0].clone())
                )
            )
    with torch.no_grad():
        for ids in SEQUENCES:
            model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return said


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_means_and_covariances_are_those_of_the_projections(architecture: str) -> None:
    """Hooks on the untouched model give the reference; Qwen2 has a bias on both projections."""
    model = tiny_model(architecture)
    said = _hooked(model)
    found = head_statistics(checkpoint_of(model), SEQUENCES, range(4))
    assert list(found) == [0, 1, 2, 3]
    for index, layer in found.items():
        kinds = (("q_proj", layer.query, 4), ("k_proj", layer.key, 2))
        for name, moments, num_heads in kinds:
            rows_TX = torch.cat(said[index, name]).double()
            heads = rows_TX.reshape(len(rows_TX), num_heads, -1)
            assert torch.allclose(moments.mean_HD, heads.mean(0), atol=1e-4)
            for head in range(num_heads):
                expected = torch.cov(heads[:, head].T, correction=0)
                assert torch.allclose(moments.covariance_HDD[head], expected, atol=1e-3)
        assert layer.scaling == pytest.approx(16**-0.5)
        assert layer.key_head_H.tolist() == [0, 0, 1, 1]
        shared = layer.key_by_query_head.mean_HD
        assert torch.equal(shared[1], layer.key.mean_HD[0])
        assert torch.equal(shared[2], layer.key.mean_HD[1])


def test_a_bias_shifts_the_mean_and_not_the_covariance() -> None:
    """The inputs of Qwen2's first layer do not depend on the bias."""
    plain, shifted = tiny_model("qwen2"), tiny_model("qwen2")
    with torch.no_grad():
        shifted.model.layers[0].self_attn.k_proj.bias += 3.0
    before, after = (
        head_statistics(checkpoint_of(model), SEQUENCES, [0])[0].key for model in (plain, shifted)
    )
    assert torch.allclose(after.mean_HD, before.mean_HD + 3, atol=1e-4)
    assert torch.allclose(after.covariance_HDD, before.covariance_HDD, atol=1e-3)


def test_only_the_layers_asked_for_are_kept(llama_checkpoint: Checkpoint) -> None:
    """A covariance takes D * D numbers per head."""
    assert list(head_statistics(llama_checkpoint, SEQUENCES, [2])) == [2]


def test_a_layer_keeps_its_own_type_and_window() -> None:
    """Gemma 3 has two tables; Cohere 2 has layers without rotation."""
    gemma = head_statistics(tiny_checkpoint("gemma3_text"), SEQUENCES, range(4))
    types = [layer.plan.layer_type for layer in gemma.values()]
    assert types == ["sliding_attention"] * 3 + ["full_attention"]
    assert [layer.sliding_window for layer in gemma.values()] == [24, 24, 24, None]
    cohere = head_statistics(tiny_checkpoint("cohere2"), SEQUENCES, range(4))
    assert [layer.plan.rotary_dim for layer in cohere.values()] == [16, 16, 16, 0]


def test_interleaved_pairs_come_half_split() -> None:
    """The formulas assume half-split pairs, and Cohere 2 pairs neighbours."""
    model = tiny_model("cohere2")
    rows_TX = torch.cat(_hooked(model)[0, "k_proj"]).double()
    means = rows_TX.mean(0).reshape(2, 16)
    key = head_statistics(checkpoint_of(model), SEQUENCES, [0])[0].key
    assert torch.allclose(key.mean_HD, torch.cat((means[:, 0::2], means[:, 1::2]), -1), atol=1e-4)


def test_a_sequence_is_not_longer_than_the_native_length(llama_checkpoint: Checkpoint) -> None:
    """A sequence is also no longer than the requested number of tokens."""
    assert sequence_len(llama_checkpoint, 512) == 64
    assert sequence_len(llama_checkpoint, 20) == 20
