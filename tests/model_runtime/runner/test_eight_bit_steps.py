"""Steps over codes of eight bits by a GPU's kernels, queued and recorded, beside a CPU's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention import work_list
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cpu_backend import EightBitCpuAttention
from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Linear, Profile, ReRope, Unscaled
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import tiny_checkpoint
from tests.doubles.recorded_runners import Again

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu.backend import TritonAttention
from tests.oracles.triton_attention import load_as_on_a_gpu

PAGE = 32
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}


def runner_over(checkpoint: Checkpoint, profiles: Sequence[Profile]) -> ModelRunner:
    """A runner with room for four sequences of four pages, and spare pages."""
    config = EngineConfig(
        kv_cache_tokens=17 * PAGE,
        max_model_len=4 * PAGE,
        page_size=PAGE,
        kv_cache_dtype="fixed8",
        max_num_seqs=5,
        num_rope_tables=len(profiles),
    )
    return build_runner(checkpoint, config, profiles)


class Talk:
    """Sequences of one runner, each under a profile of its own."""

    def __init__(self, runner: ModelRunner, profiles: Sequence[Profile]) -> None:
        self.runner = runner
        self.tables = [runner.table_id(each) for each in profiles]
        self.lens = [0] * len(profiles)

    def step(self, num_tokens: dict[int, int]) -> Tensor:
        """The logits of all tokens of a step, by its numbers of tokens."""
        spans = []
        for index, count in num_tokens.items():
            first = self.lens[index]
            tokens = [(index * 31 + at * 7) % VOCAB_SIZE for at in range(first, first + count)]
            pages = list(range(4 * index, 4 * (index + 1)))
            rows = range(count)
            spans.append(Span(tokens, first, pages, self.tables[index], rows))
            self.lens[index] += count
        return self.runner.run(spans).clone()


def test_recorded_steps_write_and_read_codes_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks over pages, then decodes that fill a page, begin the next one, and are padded.

    A CPU's own kernels are beside them, under a table and a position method. The launches of
    the second layer are those of the first one with its scales.
    """
    made = tiny_checkpoint("llama", num_hidden_layers=2, **HEADS)
    monkeypatch.setattr(work_list, "_LEAST_TILES", 1)  # contexts of several pieces
    profiles = [Profile(Linear(factor=4.0)), Profile(Unscaled(), None, ReRope(24))]
    first = made.scales[0]
    scales = {0: Scales(first.key_KD * 4, first.value_KV / 4), 1: made.scales[1]}
    talks = [Talk(runner_over(replace(made, scales=scales), profiles), profiles)]
    assert talks[0].runner._backend is EightBitCpuAttention
    load_as_on_a_gpu(monkeypatch)
    made = replace(tiny_checkpoint("llama", num_hidden_layers=2, **HEADS), scales=scales)
    talks += [Talk(runner_over(made, profiles), profiles) for _ in range(2)]
    assert talks[1].runner._backend is TritonAttention
    record = Again()
    talks[2].runner.capture_graphs(CaptureLimits(4 * PAGE, 3, 16), record)
    steps = [{0: 20, 1: 31}, {0: 20}, {0: 1, 1: 1}, {1: 1}, {1: 1, 0: 1}]
    for step in steps:
        on_cpu, queued, recorded = (talk.step(step) for talk in talks)
        # A key whose product was rounded otherwise may have the next code.
        errors = (queued - on_cpu).abs()
        assert errors.median() < 3e-3
        assert errors.max() < 0.1
        torch.testing.assert_close(recorded, queued, atol=1e-4, rtol=1e-4)
    assert record.num_replayed == 3
    stores = [talk.runner.store.page_memory()[0][:16] for talk in talks[1:]]
    assert (stores[0] == stores[1]).all(), "padding touched a sequence's page"
