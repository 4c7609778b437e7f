"""The last layer is computed only for rows whose logits are needed, with the same answers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cpu_backend import CpuAttention
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.layers import last_layer
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Profile
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import tiny_checkpoint

CONFIG = EngineConfig(kv_cache_tokens=1024, max_model_len=512, page_size=16)
ARCHITECTURES = ["llama", "cohere2", "gemma3_text", "gpt_neox", "gpt_oss", "qwen3_moe"]
LONG, SHORT = 70, 21  # tokens
PAGES, OTHER_PAGES = list(range(20, 25)), list(range(30, 33))


def ids(count: int, seed: int) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def span(token_ids: list[int], first: int, pages: Sequence[int], rows: range) -> Span:
    """A span under the first table that a runner makes."""
    return Span(token_ids, first, pages, 0, rows)


def runner_of(checkpoint: Checkpoint) -> ModelRunner:
    """A runner over a cache of its own; the table_id of its only table is 0."""
    runner = build_runner(checkpoint, CONFIG)
    native = checkpoint.native
    scaling = native.tables[native.scaled_layer_type].scaling
    assert runner.table_id(Profile(scaling)) == 0
    return runner


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_few_rows_say_what_they_say_among_all(architecture: str) -> None:
    """Two sequences run, one of them in chunks; a decode step then reads the written cache."""
    checkpoint = tiny_checkpoint(architecture)
    assert last_layer.prunes(checkpoint.model, checkpoint.plans, CpuAttention)
    long_ids, short_ids = ids(LONG, 1), ids(SHORT, 2)

    def run(*, asks_all: bool) -> list[Tensor]:
        runner = runner_of(checkpoint)

        def rows(count: int, few: int) -> range:
            return range(0 if asks_all else count - few, count)

        runner.run([span(long_ids[:40], 0, PAGES, rows(40, 0))])
        both_RV = runner.run(
            [
                span(long_ids[40:], 40, PAGES, rows(LONG - 40, 1)),
                span(short_ids, 0, OTHER_PAGES, rows(SHORT, 3)),
            ]
        )
        if asks_all:
            both_RV = torch.cat([both_RV[LONG - 41 : LONG - 40], both_RV[-3:]])
        decoded_RV = runner.run([span([5], LONG, PAGES, range(1))])
        return [both_RV, decoded_RV]

    for few_RV, all_RV in zip(run(asks_all=False), run(asks_all=True), strict=True):
        if checkpoint.report.bitwise:
            assert torch.equal(few_RV, all_RV)
        else:
            torch.testing.assert_close(few_RV, all_RV, atol=checkpoint.report.threshold, rtol=0)


def test_the_last_layer_computes_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, llama_checkpoint: Checkpoint
) -> None:
    """A step without requested rows still computes one row, because a layer needs some."""
    runner = runner_of(llama_checkpoint)
    found: list[int] = []
    attend = DecoderLayers._attend

    def counted(self: DecoderLayers, place: int, source: Any, step: Any, arrays: Any) -> Any:
        out = attend(self, place, source, step, arrays)
        found.append(len(out))
        return out

    monkeypatch.setattr(DecoderLayers, "_attend", counted)
    for rows, computed in (
        (range(LONG - 1, LONG), 1), (range(0), 1), (range(LONG), LONG), (range(5), 5),
    ):  # fmt: skip
        found.clear()
        logits_RV = runner.run([span(ids(LONG, 1), 0, PAGES, rows)])
        assert logits_RV.shape == (len(rows), VOCAB_SIZE)
        assert found == [LONG] * 3 + [computed]


def test_spans_are_cut_where_it_spares_something() -> None:
    """A decode step is not cut, and neither are rows with gaps."""
    prompt, decode = span(ids(40, 1), 3, PAGES, range(38, 40)), span([7], 9, PAGES, range(1))
    assert last_layer.pruned_spans([decode] * 30) is None
    assert last_layer.pruned_spans([span(ids(8, 1), 0, PAGES, range(7, 8))]) is None
    assert last_layer.pruned_spans([prompt._replace(logit_rows=[1, 30])]) is None
    assert last_layer.pruned_spans([decode, prompt, prompt._replace(logit_rows=range(0))]) == [
        decode,
        Span(prompt.token_ids[38:], 41, PAGES, 0, range(2)),
    ]
