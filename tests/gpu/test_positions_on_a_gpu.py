"""Position methods served on a GPU, beside a CPU: `make gpu-check`."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.doubles.engines import EngineFactory, Result, answer, deployment_of, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
METHODS = ("dual_chunk", "rerope", "self_extend", "string", "sinks")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_positions_are_served_as_on_a_cpu(engines: EngineFactory, *, enforce_eager: bool) -> None:
    """Prompts beyond every window in one batch, with recorded decodes and without."""
    answers: list[list[Result]] = []
    for device in ("cuda", "cpu"):
        checkpoint = load_checkpoint(EMBEDDED_MODEL, dtype="float32", device=device)
        asked = []
        for name in METHODS:
            positions = {"method": name, "when": "always"}
            deployment = deployment_of(
                checkpoint,
                rope_scaling={"rope_type": "default", "positions": positions},
                page_size=16,
                max_model_len=299 if name == "string" else 1024,
            )
            num_tokens = 290 if name == "string" else 700
            ids = [(7 * at + len(asked)) % 900 + 5 for at in range(num_tokens)]
            asked.append(request(deployment, ids, max_tokens=8, ignore_eos=True, prompt_logprobs=0))
        engine = engines.over(checkpoint, kv_cache_tokens=8192, enforce_eager=enforce_eager)
        answers.append(answer(engine, *asked))
    for got, expected in zip(*answers, strict=True):
        ours, theirs = (torch.tensor(each.prompt_logprob_values()) for each in (got, expected))
        assert float((ours - theirs).abs().mean()) < 1e-3
        assert len(got.token_ids) == len(expected.token_ids) == 8
