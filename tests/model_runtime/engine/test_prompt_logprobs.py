"""Logprobs of a prompt's end only: the same numbers, without the rows before."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.runner_spy import RunnerSpy

PROMPT = [(7 * at * at + 3) % VOCAB_SIZE for at in range(100)]


@pytest.mark.parametrize("first", [1, 2, 40, 64, 65, 99])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 33, "max_num_logit_rows": 7}])
def test_the_end_of_a_prompt_has_the_logprobs_of_the_whole(
    engines: EngineFactory, llama_checkpoint: Checkpoint, first: int, limits: dict[str, Any]
) -> None:
    """The prompt's end has the bits of the whole prompt's logprobs, in one chunk or many."""
    engine = engines.over(llama_checkpoint, **limits)
    deployment = deployment_of(llama_checkpoint)
    options: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 2}
    whole = answer(engine, request(deployment, PROMPT, **options))[0].prompt_logprobs
    part = answer(engine, request(deployment, PROMPT, prompt_logprobs_from=first, **options))[0]
    assert part.prompt_logprobs == (None, *whole[first:])


def test_rows_before_the_first_are_not_computed(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Skipped rows save products with the head of a large vocabulary."""
    engine = engines.over(llama_checkpoint, max_num_batched_tokens=64, max_num_logit_rows=20)
    shapes: list[tuple[int, int]] = []

    def note(spans: Sequence[Span], logits_RV: Tensor) -> None:
        assert isinstance(logits_RV, Tensor)
        shapes.append((sum(len(span.token_ids) for span in spans), len(logits_RV)))

    RunnerSpy(engine, note)
    options: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 0, "prompt_logprobs_from": 90}
    answer(engine, request(deployment_of(llama_checkpoint), PROMPT, **options))
    # Row 89 says how likely token 90 is; the last row, of token 99, ends the prompt.
    assert shapes == [(64, 0), (36, 11)]
