"""Captured steps with prompts on a GPU, beside queued ones: `make gpu-check`."""

import random

import pytest
import torch
from structlog.testing import capture_logs

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_engine
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from tests.doubles.engines import deployment_of
from tests.doubles.recorded_runners import Conversations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_prompts_answer_as_queued_ones(dtype: str) -> None:
    """Every size is proven by its first replay, and later replays have the same logits."""
    loaded = load_checkpoint(EMBEDDED_MODEL, device="cuda", dtype=dtype)
    profiles = [tier.profile for tier in deployment_of(loaded).own_tiers]
    runners = []
    for enforce_eager in (True, False):
        config = EngineConfig(
            kv_cache_tokens=1024,
            max_model_len=256,
            page_size=16,
            max_num_seqs=6,
            enforce_eager=enforce_eager,
        )
        runner = build_engine(loaded, config, profiles=profiles)._core._runner
        assert isinstance(runner, ModelRunner)
        runners.append(runner)
    graphs = runners[1]._prompt_graphs
    assert graphs is not None
    sizes = list(graphs._sizes)
    assert sorted(graphs._captured) == sizes
    draw, bound = random.Random(5), 0.05 if dtype == "bfloat16" else 1e-3
    for _ in range(8):
        talk = Conversations(runners, draw.choices(profiles, k=4))
        for _ in range(6):
            room = [index for index in range(4) if talk.lens[index] < 180]
            step = {index: draw.choice((1, draw.randint(30, 60))) for index in room}
            with capture_logs() as lines:
                expected, got = talk.step(step)
            assert not lines
            assert float((got - expected).abs().max()) <= bound * float(expected.abs().max())
    assert sum(each.is_proven for each in graphs._captured.values()) > 3
