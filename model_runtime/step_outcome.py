"""What a step's logits do to its requests: tokens chosen, prompts scored, answers ended.

Shapes: R = rows of logits, V = vocabulary.
"""

import time
from collections.abc import Sequence

import structlog
from torch import Tensor

from model_runtime.answer import Answer
from model_runtime.errors import GrammarError
from model_runtime.live_requests import Live, LiveRequests
from model_runtime.observer import Observer
from model_runtime.request import FinishReason, Output, PromptProgress, TokenLogprob
from model_runtime.sampler import finite_rows, logprobs, sample
from model_runtime.scheduler import Chunk, Scheduler
from model_runtime.step_clock import StepClock

_log = structlog.get_logger(__name__)


class StepOutcome:
    """Brings the logits of each step home."""

    def __init__(
        self, requests: LiveRequests, scheduler: Scheduler, observer: Observer, clock: StepClock
    ) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._observer = observer
        self._clock = clock

    def settle(self, computed: Sequence[tuple[Chunk, Live, int]], logits_RV: Tensor) -> None:
        """`computed`: what the step computed, and how many of the rows are whose, in order."""
        self._clock.switch("sample")
        is_finite_R = finite_rows(logits_RV)
        self._clock.switch("schedule")
        ended: list[Live] = []
        choosing: list[tuple[Live, int]] = []  # who gets a token, from which row
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
            if chunk.is_last and chunk.sequence.request.sampling.max_tokens == 0:
                ended.append(live)
            elif chunk.is_last:
                choosing.append((live, row - 1))
            self._scheduler.computed(chunk)
            if chunk.sequence.request.wants_progress and not chunk.sequence.num_generated:
                self._requests.deliver(live, Output(progress=_progress(live)))
        for live in ended:
            self._requests.deliver(live, live.answer.end_without_tokens())
        self._clock.switch("sample")
        choosing = [each for each in choosing if self._may_go_on(each[0])]
        if choosing:
            chosen_rows = [at for _, at in choosing]
            if chosen_rows != list(range(len(logits_RV))):
                logits_RV = logits_RV[chosen_rows]
            self._choose(logits_RV, [live for live, _ in choosing])

    def _may_go_on(self, live: Live) -> bool:
        """Find what the answer's grammar lets follow; False if the answer has ended with that."""
        if live.constraint is None:
            return True
        try:
            if live.constraint.look():
                return True
            output = live.answer.complete()
        except GrammarError as error:
            output = _fault_of_grammar(live, error)
        self._requests.deliver(live, output)
        return False

    def _choose(self, logits_RV: Tensor, lives: Sequence[Live]) -> None:
        """One new token for each, and its logprob where it was asked for."""
        params = [live.sequence.request.sampling for live in lives]
        token_ids = sample(logits_RV, [live.sampling_row() for live in lives])
        reported: dict[int, TokenLogprob] = {}
        wanted = [index for index, each in enumerate(params) if each.logprobs is not None]
        if wanted:
            chosen = [token_ids[index] for index in wanted]
            num_top = [params[index].logprobs or 0 for index in wanted]
            found = logprobs(logits_RV[wanted], chosen, num_top)
            reported = dict(zip(wanted, found, strict=True))
        for index, (live, token_id) in enumerate(zip(lives, token_ids, strict=True)):
            self._clock.switch("deliver")
            live.add_token(token_id)
            self._requests.note_token(live)
            self._clock.switch("detokenize")
            try:
                constraint = live.constraint
                is_complete = constraint is not None and constraint.advance(token_id)
                output = live.answer.add(token_id, reported.get(index), is_complete=is_complete)
            except GrammarError as error:
                output = _fault_of_grammar(live, error)
            except Exception as error:  # noqa: BLE001  # a tokenizer's fault ends its request only
                _log.exception("answer_failed", request_id=live.sequence.request.request_id)
                text = f"{type(error).__name__} while decoding a token"
                output = Output(finish_reason=FinishReason.ERROR, error=text)
            self._requests.deliver(live, output)


def _fault_of_grammar(live: Live, error: GrammarError) -> Output:
    _log.error("grammar_failed", request_id=live.sequence.request.request_id, error=str(error))
    return Output(finish_reason=FinishReason.ERROR, error=str(error))


def _progress(live: Live) -> PromptProgress:
    sequence = live.sequence
    began = live.arrived if live.started is None else live.started
    return PromptProgress(
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens or 0,
        sequence.num_computed,
        time.monotonic() - began,
    )


def _score_prompt(chunk: Chunk, answer: Answer, logits_RV: Tensor) -> None:
    """Each row says how likely the token after it was; the prompt's last has none after it.

    A sequence that was preempted in its prompt has delivered the first of them before.
    """
    sequence = chunk.sequence
    first = max(chunk.first, sequence.num_scored)
    end = min(chunk.first + chunk.num_tokens, sequence.num_prompt_tokens)
    following = sequence.request.prompt_ids[first + 1 : end + 1]
    num_top = [sequence.request.sampling.prompt_logprobs or 0] * len(following)
    answer.add_prompt_logprobs(logprobs(logits_RV[: len(following)], following, num_top))
    sequence.num_scored = max(sequence.num_scored, end)
