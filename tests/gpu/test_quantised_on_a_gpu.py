"""A cache in few bits served on a GPU, beside a CPU: `make gpu-check`.

The kernels' own cases are in tests/model_runtime/attention/test_triton_quantised.py.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.quantised.page_format import FORMATS
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.request import Request
from tests.doubles.engines import EngineFactory, Result, answer, deployment_of, num_same, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
TOKENS = 4096
LENS = (5, 64, 150, 700)  # within a page, a whole one, and over pages
# Mean differences of logprobs in float32. A value near a bound takes the next code after another
# rounding, and later layers follow: on a CPU, weights of norms that differ by 1e-6 give 0.0015,
# 0.0044 and 0.016 in the longest prompt. The formats themselves change it by 0.009, 0.07 and 0.16.
MOST = {"int8": 0.003, "k8v4": 0.01, "int4": 0.03}


def asked(checkpoint: Checkpoint, num_tokens: int = 40) -> list[Request]:
    """Prompts with logprobs, whose answers begin further pages."""
    deployment = deployment_of(checkpoint)
    return [
        request(
            deployment,
            [(7 * at + length) % 900 + 5 for at in range(length)],
            max_tokens=num_tokens,
            ignore_eos=True,
            prompt_logprobs=0,
        )
        for length in LENS
    ]


def engine_of(engines: EngineFactory, on: Checkpoint, kind: str, **config: object) -> Engine:
    """An engine with pages of 64 tokens and eight tail pages."""
    sizes = {"page_size": 64, "kv_cache_tokens": TOKENS, "max_model_len": 1024, "max_num_seqs": 8}
    return engines.over(on, kv_cache_dtype=kind, **sizes, **config)


def compare(got: list[Result], expected: list[Result], most: float) -> None:
    """Logprobs of prompts agree in the mean; a code may be the next one after another rounding."""
    for one, other in zip(got, expected, strict=True):
        ours, theirs = (torch.tensor(each.prompt_logprob_values()) for each in (one, other))
        assert len(ours) == len(theirs)
        assert float((ours - theirs).abs().mean()) < most
        assert len(one.token_ids) == len(other.token_ids) == 40


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_pages_are_served_as_on_a_cpu(
    engines: EngineFactory, kind: str, dtype: str, *, enforce_eager: bool
) -> None:
    """The CPU's kernels over the same format are the reference, in float32."""
    on_gpu = load_checkpoint(EMBEDDED_MODEL, dtype=dtype, device="cuda")
    on_cpu = load_checkpoint(EMBEDDED_MODEL, dtype="float32", device="cpu")
    engine = engine_of(engines, on_gpu, kind, enforce_eager=enforce_eager)
    compare(
        answer(engine, *asked(on_gpu)), answer(engine_of(engines, on_cpu, kind), *asked(on_cpu)),
        MOST[kind] if dtype == "float32" else 0.1,
    )  # fmt: skip
    layout = on_gpu.cache_layout(64, kind)
    num_spare = 0 if enforce_eager else 1
    counted = (TOKENS + 64 * num_spare) * layout.token_bytes
    counted += (8 + num_spare) * layout.tail_bytes
    assert engine._core._runner.store.num_bytes == counted


@pytest.mark.parametrize("kind", FORMATS)
def test_a_prefix_and_a_draft_change_an_answer_by_roundings_only(
    engines: EngineFactory, kind: str
) -> None:
    """Found pages are quantised already, and rows of a draft share a tail page."""
    on_gpu = load_checkpoint(EMBEDDED_MODEL, dtype="float32", device="cuda")
    asks = [*asked(on_gpu), *asked(on_gpu)]
    plain, drafting = (engine_of(engines, on_gpu, kind, max_draft_tokens=most) for most in (0, 7))
    first = answer(plain, *asks)
    for again in (answer(plain, *asks), answer(drafting, *asks)):
        same = [num_same(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True)]
        # An answer may differ after two tokens that are about as probable.
        assert sum(each == 40 for each in same) >= 6
