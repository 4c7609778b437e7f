"""Logprobs of a prompt's end only: the same numbers, without the rows before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from model_runtime.loading.checkpoint import Checkpoint
from tests.engines import EngineFactory, answer, deployment_of, request, tiny_checkpoint
from tests.tiny_models import VOCAB_SIZE

PROMPT = [(7 * at * at + 3) % VOCAB_SIZE for at in range(100)]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """A llama of four layers."""
    return tiny_checkpoint("llama")


@pytest.mark.parametrize("first", [1, 2, 40, 64, 65, 99])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 33, "max_num_logit_rows": 7}])
def test_the_end_of_a_prompt_has_the_logprobs_of_the_whole(
    engines: EngineFactory, checkpoint: Checkpoint, first: int, limits: dict[str, Any]
) -> None:
    """The bits are equal in one chunk or many, with an entry for each token from there on."""
    engine = engines.over(checkpoint, **limits)
    deployment = deployment_of(checkpoint)
    options: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 2}
    whole = answer(engine, request(deployment, PROMPT, **options))[0].prompt_logprobs
    part = answer(engine, request(deployment, PROMPT, prompt_logprobs_from=first, **options))[0]
    assert part.prompt_logprobs == (None, *whole[first:])


def test_rows_before_the_first_are_not_computed(
    engines: EngineFactory, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipping them saves products with the head of a large vocabulary."""
    engine = engines.over(checkpoint, max_num_batched_tokens=64, max_num_logit_rows=20)
    runner = engine._core._runner
    shapes: list[tuple[int, int]] = []
    own = runner.run

    def run(spans: Any, clock: Any) -> Tensor:
        logits_RV = own(spans, clock)
        assert isinstance(logits_RV, torch.Tensor)
        shapes.append((sum(len(span.token_ids) for span in spans), len(logits_RV)))
        return logits_RV

    monkeypatch.setattr(runner, "run", run)
    options: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_from": 90}
    answer(engine, request(deployment_of(checkpoint), PROMPT, **options))
    # Row 89 says how likely token 90 is; the last row, of token 99, ends the prompt.
    assert shapes == [(64, 0), (36, 11)]
