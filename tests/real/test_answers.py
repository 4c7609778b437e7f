"""Real checkpoints answer as transformers does, whatever else is served, at any length.

In `make test`, test_smollm2.py stands for them.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from tests.checkpoints.real_model import GEMMA3, SMOLLM2, RealModel
from tests.checkpoints.real_reference import Reference
from tests.servers.processes import Server
from tests.servers.real_client import (
    CONTINUED,
    PROMPT,
    SHORT_LEN,
    TEXT,
    YARN,
    complete,
    echoed,
    rope_of,
    text_of,
)

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(600)]


def of(*models: Any) -> pytest.MarkDecorator:
    """Run a test with each of these checkpoints."""
    return pytest.mark.parametrize("checkpoint", models, indirect=True)


SMOL = pytest.param(SMOLLM2, id="smollm2")
GEMMA = pytest.param(GEMMA3, id="gemma3")


# The largest difference of a logprob from transformers with exact angles. SmolLM2 was within
# 5.3e-5, and Gemma 3 within 1.6e-4. The same Gemma 3 in float64 is up to 1.1e-4 from ours and up to
# 6.3e-5 from transformers' float32, so this is the rounding of both.
APART = {"smollm2": 1e-4, "gemma3": 3e-4}
# One of Gemma 3's 1,500 logprobs under YaRN moves by 2.9e-4 to 7.4e-4 if the weights in
# transformers change by a unit of their last place; the next one moves by 9e-5.
ONE_APART = 2e-3
_salts = map(str, count())


def assert_close(got: torch.Tensor, expected: torch.Tensor, checkpoint: RealModel) -> None:
    """Assert that logprobs are apart by rounding."""
    *others, one = (got - expected).abs().sort().values.tolist()
    assert others[-1] < APART[checkpoint.name]
    assert one < ONE_APART


@of(SMOL, GEMMA)
def test_rounded_activations_move_probabilities_little(
    checkpoint: RealModel, gguf_path: Path
) -> None:
    """The banner's text has short pieces, which move more than long ones: Gemma 3 by 0.013."""
    rounding = load_checkpoint(gguf_path, device="cpu", activations="int8").rounding
    assert rounding is not None, checkpoint.name
    assert 1e-4 < rounding.divergence < 0.03
    assert rounding.agreement > 0.85


@of(SMOL, GEMMA)
def test_a_greedy_completion_is_the_recorded_one(checkpoint: RealModel, served: Server) -> None:
    """The text is that of transformers, which the long tests ask."""
    answer = complete(served, prompt=PROMPT, max_tokens=24)
    assert text_of(answer) == CONTINUED[checkpoint.name]


@of(SMOL, GEMMA)
def test_a_greedy_completion_is_that_of_generate(
    checkpoint: RealModel, served: Server, reference: Reference
) -> None:
    """Tokens of the prompt, weights and every step are those of transformers."""
    ids = reference.encode(PROMPT, adds_special_tokens=True)
    answer = complete(served, prompt=PROMPT, max_tokens=24)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    expected = reference.continued(ids, 24)
    assert (text_of(answer), expected) == (expected, CONTINUED[checkpoint.name])


@of(SMOL, GEMMA)
def test_answers_are_the_same_alone_and_together(served: Server) -> None:
    """Text and logprobs of requests of several lengths are equal to the bit."""
    prompts = [TEXT[start : start + 150 * num] for num, start in enumerate((0, 900, 5000, 9000), 1)]

    def ask(prompt: str) -> tuple[str, Any]:
        fields = {"max_tokens": 6, "logprobs": 3, "cache_salt": next(_salts)}
        answer = complete(served, prompt=prompt, **fields)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        return text_of(answer), answer["choices"][0]["logprobs"]

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(ask, prompts))
    assert together == alone


@of(SMOL, GEMMA)
def test_a_cached_prefix_longer_than_the_window_changes_no_bit(
    checkpoint: RealModel, served: Server
) -> None:
    """Most layers of Gemma 3 see 512 tokens, and the shared beginning has more than 1,200."""
    shared, salt = TEXT[:5400], next(_salts)

    def ask(end: str, salt: str) -> tuple[int, Any]:
        fields = {"max_tokens": 6, "logprobs": 3, "cache_salt": salt}
        answer = complete(served, prompt=shared + end, **fields)
        assert answer["usage"]["prompt_tokens"] > 1200
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, (text_of(answer)[len(shared + end) :], answer["choices"][0]["logprobs"])

    ask("\n\nThe first end of the text says", salt)
    num_cached, warm = ask("\n\nAnother one asks for", salt)
    num_cold, cold = ask("\n\nAnother one asks for", next(_salts))
    assert num_cold == 0
    assert num_cached > 1100
    assert warm == cold


@of(SMOL, GEMMA)
def test_logprobs_within_the_trained_length(
    checkpoint: RealModel, served: Server, reference: Reference
) -> None:
    """They are those of transformers with exact angles at 1,500 tokens."""
    ids = reference.encode(TEXT[:20_000])[:1500]
    answer = complete(served, prompt=ids, echo=True, logprobs=0, max_tokens=1)
    assert rope_of(answer) == ("default", 1)
    with reference.exact_angles():
        expected = reference.logprobs(ids)
    assert_close(echoed(answer, len(ids)), expected, checkpoint)


@of(SMOL, GEMMA)
def test_logprobs_past_a_stated_length(
    checkpoint: RealModel, served: Server, reference: Reference
) -> None:
    """They are those of transformers' static YaRN at 1,500 tokens, if 1,024 are stated.

    Policy grow reads a whole prompt by one table.
    """
    ids = reference.encode(TEXT[:20_000])[:1500]
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1, "rope": {"policy": "grow"}}
    answer = complete(served, model="short", prompt=ids, **fields)
    assert rope_of(answer) == ("yarn", 2)
    got = echoed(answer, len(ids))
    with reference.exact_angles({**YARN, "original_max_position_embeddings": SHORT_LEN}):
        expected = reference.logprobs(ids)
    assert_close(got, expected, checkpoint)
    unscaled = complete(served, prompt=ids, echo=True, logprobs=0, max_tokens=1)
    assert (got - echoed(unscaled, len(ids))).abs().max() > 0.1
