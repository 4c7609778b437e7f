"""A cache of eight bits with fixed scales served on a GPU, beside a CPU: `make gpu-check`.

The kernels' own cases are in tests/model_runtime/attention/test_triton_backend.py.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.request import Request
from tests.doubles.engines import EngineFactory, answer, deployment_of, num_same, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
TOKENS = 4096
LENS = (5, 64, 150, 700)  # within a page, a whole one, and over pages
# Mean difference of logprobs. A number near the middle of two codes takes the other one after
# another rounding, and later layers follow.
MOST = 0.1


def asked(checkpoint: Checkpoint) -> list[Request]:
    """Prompts with logprobs, whose answers begin further pages."""
    deployment = deployment_of(checkpoint)
    return [
        request(
            deployment,
            [(7 * at + length) % 900 + 5 for at in range(length)],
            max_tokens=40,
            ignore_eos=True,
            prompt_logprobs=0,
        )
        for length in LENS
    ]


def engine_of(engines: EngineFactory, on: Checkpoint, **config: object) -> Engine:
    """An engine with pages of 64 tokens."""
    sizes = {"page_size": 64, "kv_cache_tokens": TOKENS, "max_model_len": 1024, "max_num_seqs": 8}
    return engines.over(on, kv_cache_dtype="fixed8", **sizes, **config)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes_are_served_as_on_a_cpu(
    engines: EngineFactory, dtype: str, *, enforce_eager: bool
) -> None:
    """The CPU's kernels over the same codes are the reference, in float32."""
    on_gpu = load_checkpoint(EMBEDDED_MODEL, dtype=dtype, device="cuda")
    on_cpu = load_checkpoint(EMBEDDED_MODEL, dtype="float32", device="cpu")
    engine = engine_of(engines, on_gpu, enforce_eager=enforce_eager)
    got = answer(engine, *asked(on_gpu))
    expected = answer(engine_of(engines, on_cpu), *asked(on_cpu))
    for one, other in zip(got, expected, strict=True):
        ours, theirs = (torch.tensor(each.prompt_logprob_values()) for each in (one, other))
        assert float((ours - theirs).abs().mean()) < MOST
        assert len(one.token_ids) == len(other.token_ids) == 40
    store = engine._core._runner.store
    assert store.dtype == torch.int8
    layout = on_gpu.cache_layout(64, "fixed8")
    assert store.num_bytes == (TOKENS + 64 * (not enforce_eager)) * layout.token_bytes


def test_a_prefix_and_a_draft_change_an_answer_by_roundings_only(engines: EngineFactory) -> None:
    """Pages that are found have the codes that were written."""
    on_gpu = load_checkpoint(EMBEDDED_MODEL, dtype="float32", device="cuda")
    asks = [*asked(on_gpu), *asked(on_gpu)]
    plain, drafting = (engine_of(engines, on_gpu, max_draft_tokens=most) for most in (0, 7))
    first = answer(plain, *asks)
    for again in (answer(plain, *asks), answer(drafting, *asks)):
        same = [num_same(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True)]
        # An answer may differ after two tokens that are about as probable.
        assert sum(each == 40 for each in same) >= 6
