"""Process a step's logits: sample tokens, score prompts and end answers.

Shapes: R = rows of logits, V = vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from torch import Tensor

from model_runtime.engine.observer import Observer
from model_runtime.engine.output_processor import Answer
from model_runtime.engine.request_state import RequestState, RequestStates
from model_runtime.errors import GrammarError
from model_runtime.request import FinishReason, Output, PromptProgress, TokenLogprob
from model_runtime.runner.sampler import choose, logprobs, rows_at
from model_runtime.runner.step_timer import StepTimer
from model_runtime.scheduling.scheduler import Chunk, Scheduler

_log = structlog.get_logger(__name__)


class Postprocessor:
    """The update of all requests of a step from its logits."""

    def __init__(
        self, requests: RequestStates, scheduler: Scheduler, observer: Observer, clock: StepTimer
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._observer = observer
        self._clock = clock

    def settle(
        self, computed: Sequence[tuple[Chunk, RequestState, int]], logits_RV: Tensor
    ) -> None:
        """Update the requests of a step. `computed`: (chunk, request, row count), in row order."""
        self._clock.switch("sample")
        choosing, endings = self._choosing(computed)
        is_finite_R, token_ids = choose(
            logits_RV,
            [place for place, _ in choosing],
            [live.sampling_row() for _, live in choosing],
        )
        self._clock.switch("schedule")
        row = 0
        for chunk, live, num_rows in computed:
            rows = slice(row, row + num_rows)
            row = rows.stop
            if not all(is_finite_R[rows]):
                self._scheduler.distrust_cache()
                self._observer.nan_aborted(chunk.sequence.request)
                self._requests.fail(live, "the model answered with NaN or Inf")
                continue
            if chunk.is_scored:
                self._clock.switch("sample")
                _score_prompt(chunk, live.answer, logits_RV[rows])
                self._clock.switch("schedule")
            self._scheduler.computed(chunk)
            if chunk.sequence.request.wants_progress and not chunk.sequence.num_generated:
                self._requests.deliver(live, Output(progress=_progress(live)))
        # Requests that are no longer live had logits that are not finite.
        for live, end in endings:
            if self._requests.is_live(live):
                self._requests.deliver(live, end())
        self._clock.switch("sample")
        chosen = [
            (place, live, token_id)
            for (place, live), token_id in zip(choosing, token_ids, strict=True)
            if self._requests.is_live(live)
        ]
        self._add_tokens(chosen, logits_RV)

    def _choosing(
        self, computed: Sequence[tuple[Chunk, RequestState, int]]
    ) -> tuple[list[tuple[int, RequestState]], list[tuple[RequestState, Callable[[], Output]]]]:
        """Return (row, request) pairs to sample, and (request, end) pairs of answers that end."""
        choosing: list[tuple[int, RequestState]] = []
        endings: list[tuple[RequestState, Callable[[], Output]]] = []
        row = 0
        for chunk, live, num_rows in computed:
            row += num_rows
            if not chunk.is_last:
                continue
            end = _end_before(live)
            if end is None:
                choosing.append((row - 1, live))
            else:
                endings.append((live, end))
        return choosing, endings

    def _add_tokens(
        self, chosen: Sequence[tuple[int, RequestState, int]], logits_RV: Tensor
    ) -> None:
        """Add new tokens, as (row, request, token), with their logprobs if requested."""
        reported = _reported_logprobs(chosen, logits_RV)
        for place, live, token_id in chosen:
            self._clock.switch("deliver")
            live.add_token(token_id)
            self._requests.note_token(live)
            self._clock.switch("detokenize")
            try:
                constraint = live.constraint
                is_complete = constraint is not None and constraint.advance(token_id)
                output = live.answer.add(token_id, reported.get(place), is_complete=is_complete)
            except GrammarError as error:
                output = _fault_of_grammar(live, error)
            except Exception as error:  # noqa: BLE001  # a tokenizer's fault ends its request only
                _log.exception("answer_failed", request_id=live.sequence.request.request_id)
                text = f"{type(error).__name__} while decoding a token"
                output = Output(finish_reason=FinishReason.ERROR, error=text)
            self._requests.deliver(live, output)


def _end_before(live: RequestState) -> Callable[[], Output] | None:
    """Return the function that ends the answer without another token; None if it continues.

    Also computes the tokens that the answer's grammar allows next.
    """
    if live.sequence.request.sampling.max_tokens == 0:
        return live.answer.end_without_tokens
    if live.constraint is None:
        return None
    try:
        return None if live.constraint.look() else live.answer.complete
    except GrammarError as error:
        return partial(_fault_of_grammar, live, error)


def _reported_logprobs(
    chosen: Sequence[tuple[int, RequestState, int]], logits_RV: Tensor
) -> dict[int, TokenLogprob]:
    """Return the logprobs by row, for the requests that report them."""
    asking = [
        (place, token_id, most)
        for place, live, token_id in chosen
        if (most := live.sequence.request.sampling.logprobs) is not None
    ]
    if not asking:
        return {}
    places, token_ids, num_top = zip(*asking, strict=True)
    found = logprobs(rows_at(logits_RV, places), token_ids, num_top)
    return dict(zip(places, found, strict=True))


def _fault_of_grammar(live: RequestState, error: GrammarError) -> Output:
    _log.error("grammar_failed", request_id=live.sequence.request.request_id, error=str(error))
    return Output(finish_reason=FinishReason.ERROR, error=str(error))


def _progress(live: RequestState) -> PromptProgress:
    sequence = live.sequence
    began = live.arrived if live.started is None else live.started
    return PromptProgress(
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens or 0,
        sequence.num_computed,
        time.monotonic() - began,
    )


def _score_prompt(chunk: Chunk, answer: Answer, logits_RV: Tensor) -> None:
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
