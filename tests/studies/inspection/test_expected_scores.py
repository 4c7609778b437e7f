"""The expected scores of the formulas, against the real scores of the embedded model."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.rope import Frequencies, Yarn
from ropewalk.rope.decay import expected_score, score_spread
from ropewalk.server.corpus.held_out import library_documents
from ropewalk.studies.inspection.head_statistics import LayerStatistics, head_statistics

LEN, NUM = 256, 12


def sequences(checkpoint: Checkpoint) -> list[list[int]]:
    """The token ids at the beginnings of held-out sources."""
    texts = [each.text[: 8 * LEN] for each in library_documents(held_out=True)[:NUM]]
    encoded = [checkpoint.tokenizer.encode(text)[:LEN] for text in texts]
    return [ids for ids in encoded if len(ids) == LEN]


@torch.no_grad()
def rotated_by_transformers(ids: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Queries and keys of an untouched model, rotated by its own function: [S, heads, T, D]."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    said: dict[str, list[Tensor]] = {"q_proj": [], "k_proj": []}
    for layer in model.model.layers:
        for name, outputs in said.items():
            getattr(layer.self_attn, name).register_forward_hook(
                lambda _module, _inputs, output, outputs=outputs: outputs.append(output)
            )
    token_ids = torch.tensor(ids)
    model(input_ids=token_ids, use_cache=False)
    positions = torch.arange(LEN)[None]
    cos, sin = model.model.rotary_emb(token_ids.float(), positions)
    turned = [
        apply_rotary_pos_emb(*(x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in pair), cos, sin)
        for pair in zip(said["q_proj"], said["k_proj"], strict=True)
    ]
    return [query for query, _ in turned], [key for _, key in turned]


def test_real_scores_have_the_expected_mean_and_spread(embedded: Checkpoint) -> None:
    """Distances 0 and 1 are left out, because their queries and keys are correlated."""
    ids = sequences(embedded)
    assert len(ids) > 5
    found = head_statistics(embedded, ids, range(4))
    table = embedded.native.tables["all"].frequencies()
    distances = [2, 4, 16, 64, 128]
    for index, (query, key) in enumerate(zip(*rotated_by_transformers(ids), strict=True)):
        layer = found[index]
        given = (layer.query, layer.key_by_query_head, table, torch.tensor(distances), 64**-0.5)
        expected_HM, spread_HM = expected_score(*given), score_spread(*given)
        for column, distance in enumerate(distances):
            keys = key.repeat_interleave(2, dim=1)[:, :, : LEN - distance]
            score_HX = ((query[:, :, distance:] * keys).sum(-1) / 8).transpose(0, 1).flatten(1)
            assert float((score_HX.mean(1) - expected_HM[:, column]).abs().max()) < 0.6
            assert torch.allclose(score_HX.std(1).double(), spread_HM[:, column], rtol=0.25)


def test_past_the_native_length_the_decay_ends_and_yarn_carries_it_on(embedded: Checkpoint) -> None:
    """The mean is over all heads; docs/design/rotation.md says so."""
    layers = head_statistics(embedded, sequences(embedded), range(4)).values()
    native = embedded.native.tables["all"]
    yarn = native.frequencies(Yarn(factor=8.0, original_max_position_embeddings=256))

    def mean(table: Frequencies, first: int, last: int) -> float:
        return float(torch.cat([_expected(each, table, first, last) for each in layers]).mean())

    near, far = (64, 128), (320, 512)
    assert mean(native.frequencies(), *near) < -1.5
    assert mean(native.frequencies(), *far) > -0.5
    ranges = ((1, 8), near, far, (512, 1024))
    falling = [mean(yarn, *each) for each in ranges]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < -2.5


def _expected(layer: LayerStatistics, table: Frequencies, first: int, last: int) -> Tensor:
    moments = (layer.query, layer.key_by_query_head)
    return expected_score(*moments, table, torch.arange(first, last), layer.scaling)
