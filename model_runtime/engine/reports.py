"""What outputs report beside tokens: logprobs of answers and prompts, and a prompt's progress.

Shapes: R = rows of logits, V = vocabulary.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ropewalk.model_runtime.engine.output_processor import Answer
from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.request import PromptProgress, TokenLogprob
from ropewalk.model_runtime.runner.sampler import logprobs, rows_at
from ropewalk.model_runtime.scheduling.step_plan import Chunk


class NewToken(NamedTuple):
    """A sampled token that its answer does not contain yet."""

    state: RequestState
    row: int  # of the logits
    token_id: int


def reported_logprobs(
    new_tokens: Sequence[NewToken], logits_RV: Tensor | None
) -> dict[int, TokenLogprob]:
    """Return the logprobs by row, for the requests that report them."""
    reporting = [
        (row, token_id, num_top)
        for state, row, token_id in new_tokens
        if (num_top := state.sequence.request.sampling.logprobs) is not None
    ]
    if not reporting:
        return {}
    assert logits_RV is not None, "a row with logprobs was launched"
    rows, token_ids, num_tops = zip(*reporting, strict=True)
    found = logprobs(rows_at(logits_RV, rows), token_ids, num_tops)
    return dict(zip(rows, found, strict=True))


def progress(state: RequestState) -> PromptProgress:
    sequence = state.sequence
    began = state.arrived if state.started is None else state.started
    return PromptProgress(
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens or 0,
        sequence.num_computed,
        time.monotonic() - began,
    )


def score_prompt(chunk: Chunk, answer: Answer, logits_RV: Tensor) -> None:
    """Add the logprobs of a prompt chunk to its answer.

    Each row gives the logprob of the next token. The last row of the prompt has no next token.
    A sequence that was preempted in its prompt has delivered its first logprobs already.
    """
    sequence = chunk.sequence
    first = max(chunk.first, sequence.num_scored)
    end = min(chunk.first + chunk.num_tokens, sequence.num_prompt_tokens)
    following = sequence.request.prompt_ids[first + 1 : end + 1]
    num_top = [sequence.request.sampling.prompt_logprobs or 0] * len(following)
    answer.add_prompt_logprobs(logprobs(logits_RV[: len(following)], following, num_top))
    sequence.num_scored = max(sequence.num_scored, end)
