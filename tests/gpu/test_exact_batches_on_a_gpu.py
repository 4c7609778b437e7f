"""The same bits in any batch on a GPU, by exact_batches: `make gpu-check`."""

import random
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.request import Request
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import (
    EngineFactory,
    Preemptions,
    answer,
    checkpoint_of,
    deployment_of,
    request,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
LENGTHS = (1, 5, 16, 17, 63, 64, 65, 200, 600, 1100)  # of prompts, behind a common start or none


def mixed(checkpoint: Checkpoint, count: int, most_len: int) -> list[Request]:
    """Greedy and sampled requests, some with logprobs, some behind a common start."""
    draw = random.Random(5)
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 8.0})
    start = [draw.randrange(5, checkpoint.vocab_size) for _ in range(150)]
    found = []
    for seed in range(count):
        common = start[: draw.choice((0, 0, 64, 150))]
        num = draw.choice([each for each in LENGTHS if each + len(common) < most_len])
        # Some prompts repeat themselves, so that drafts are made.
        period = draw.choice((3, 1 << 20))
        own = [draw.randrange(5, checkpoint.vocab_size) for _ in range(min(num, period))]
        prompt = [*common, *(own * (num // len(own) + 1))[:num]]
        found.append(
            request(
                deployment,
                prompt,
                max_tokens=draw.randint(2, 14),
                temperature=draw.choice((0.0, 0.9)),
                top_p=draw.choice((1.0, 0.9)),
                seed=seed,
                logprobs=draw.choice((None, None, 5)),
                prompt_logprobs=draw.choice((None,) * 9 + (2,)),
                ignore_eos=True,
            )
        )
    return found


def check(engines: EngineFactory, checkpoint: Checkpoint, asked: Sequence[Request]) -> None:
    """Compare all requests one by one, and together in two ways."""
    assert checkpoint.report.bitwise
    alone = engines.over(checkpoint, max_num_seqs=1, kv_cache_tokens=16_384)
    expected = [answer(alone, each)[0] for each in asked]
    together = engines.over(
        checkpoint,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        kv_cache_tokens=65_536,
        max_queued_requests=len(asked),
        max_draft_tokens=None,
    )
    assert answer(together, *asked) == expected
    preemptions = Preemptions()
    eager = engines.over(
        checkpoint,
        observer=preemptions,
        max_num_seqs=64,
        max_num_batched_tokens=300,
        kv_cache_tokens=8192,
        max_queued_requests=len(asked),
        enforce_eager=True,
    )
    some = slice(0, len(asked) // 4)
    assert answer(eager, *asked[some]) == expected[some]
    assert preemptions.num


@pytest.mark.alone
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_thousand_requests_have_no_other_bit(engines: EngineFactory, dtype: str) -> None:
    """Prompts up to 1,250 tokens: cached prefixes, chunks, drafts, captured and queued steps."""
    checkpoint = load_checkpoint(EMBEDDED_MODEL, dtype=dtype, device="cuda", exact_batches=True)
    check(engines, checkpoint, mixed(checkpoint, 1000, 1300))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gemma2"])
def test_mixtures_and_windows_have_no_other_bit(engines: EngineFactory, name: str) -> None:
    """Experts, sinks, soft caps and windows, in a tiny model with random weights."""
    model = tiny_model(name).to("cuda", torch.bfloat16)
    checkpoint = checkpoint_of(model, exact_batches=True)
    check(engines, checkpoint, mixed(checkpoint, 200, 400))
