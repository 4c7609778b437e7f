"""Process a step's logits: sample tokens, score prompts and end answers.

Shapes: R = rows of logits, V = vocabulary.
"""

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import structlog
from torch import Tensor

from ropewalk.model_runtime.engine.choose_tokens import NO_TOKEN, choose_tokens
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestState, RequestStates
from ropewalk.model_runtime.engine.speculator import RightDrafts
from ropewalk.model_runtime.errors import GrammarError
from ropewalk.model_runtime.request import FinishReason, Output, TokenLogprob
from ropewalk.model_runtime.runner.sampler import logprobs, rows_at
from ropewalk.model_runtime.runner.step_timer import StepTimer
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.step_plan import Chunk, StepPlan

_log = structlog.get_logger(__name__)


class ComputedChunk(NamedTuple):
    """A chunk of a step that has run."""

    chunk: Chunk
    state: RequestState
    rows: slice  # its rows of logits
    is_last: bool  # a token is sampled from its last row


class _NewToken(NamedTuple):
    """A sampled token that its answer does not contain yet."""

    state: RequestState
    row: int  # of the logits
    token_id: int


class _Rows(NamedTuple):
    """A decode with or without a draft, whose first row of logits is `begin`."""

    state: RequestState
    chunk: Chunk
    begin: int


class _Ending(NamedTuple):
    """A request that ends without another token."""

    state: RequestState
    last_output: Callable[[], Output]


class Postprocessor:
    """The update of all requests of a step from its logits."""

    def __init__(
        self,
        requests: RequestStates,
        scheduler: Scheduler,
        observer: Observer,
        clock: StepTimer,
        right_drafts: RightDrafts | None,
    ) -> None:
        """Keep what an update needs. `right_drafts`: that of a model with states."""
        self._right_drafts = right_drafts
        self._requests = requests
        self._scheduler = scheduler
        self._observer = observer
        self._clock = clock

    def process(
        self, chunks: Collection[Chunk], states: Sequence[RequestState], logits_RV: Tensor
    ) -> None:
        """Update the requests of a step, whose chunks are in the order of their rows."""
        computed = _computed(chunks, states)
        with self._clock.part("sample"):
            sampled, endings = _split(computed)
            places = [each.rows.stop - 1 for each in sampled]
            states = [each.state for each in sampled]
            chosen = choose_tokens(logits_RV, places, states)
        self._update(computed, sampled, endings, chosen, logits_RV)

    def process_launched(
        self,
        plan: StepPlan,
        states: Sequence[RequestState],
        is_finite_R: Sequence[bool],
        token_ids: Sequence[int],
    ) -> None:
        """Update the requests of a launched step from the token of each of its rows.

        Some may have ended since the launch.
        """
        if plan.is_decode_only:
            live = [row for row, state in enumerate(states) if state.sequence.is_running]
            self.add_tokens(
                [states[row] for row in live],
                [is_finite_R[row] for row in live],
                [token_ids[row] for row in live],
            )
            return
        computed = _computed(plan.chunks.values(), states)
        computed = [each for each in computed if each.state.sequence.is_running]
        sampled = [each for each in computed if each.is_last]
        tokens = [token_ids[each.rows.start] for each in sampled]
        self._update(computed, sampled, [], (is_finite_R, tokens), None)

    def _update(
        self,
        computed: Sequence[ComputedChunk],
        sampled: Sequence[ComputedChunk],
        endings: Sequence[_Ending],
        chosen: tuple[Sequence[bool], Sequence[int]],
        logits_RV: Tensor | None,
    ) -> None:
        """Record the chunks of a step, and deliver the tokens of those that are sampled.

        `chosen`: whether each row of the step is finite, and a token for each sampled chunk.
        `logits_RV`: None if no request needs them.
        """
        is_finite_R, token_ids = chosen
        has_failed = not all(is_finite_R) or NO_TOKEN in token_ids
        self._fail_without_token([each.state for each in sampled], token_ids)
        for each in computed:
            if has_failed and not self._requests.is_live(each.state):
                continue
            if has_failed and not all(is_finite_R[each.rows]):
                self._fail(each.state)
            else:
                self._record(each, logits_RV)
        if has_failed:
            endings = [each for each in endings if self._requests.is_live(each.state)]
        new_tokens = [
            _NewToken(each.state, each.rows.stop - 1, token_id)
            for each, token_id in zip(sampled, token_ids, strict=True)
            if not has_failed or self._requests.is_live(each.state)
        ]
        outputs = self._outputs(new_tokens, logits_RV)
        with self._clock.part("deliver"):
            for state, last_output in endings:
                self._requests.deliver(state, last_output())
            now = time.monotonic()
            for new, output in zip(new_tokens, outputs, strict=True):
                self._requests.note_token(new.state, now)
                self._requests.deliver(new.state, output)

    def process_decodes(self, states: Sequence[RequestState], logits_RV: Tensor) -> None:
        """Update the requests of a step of plain decodes, which has one row for each."""
        with self._clock.part("sample"):
            is_finite_R, token_ids = choose_tokens(logits_RV, range(len(states)), states)
        self.add_tokens(states, is_finite_R, token_ids)

    def process_drafts(self, chunks: Sequence[Chunk], logits_RV: Tensor, *, at_once: bool) -> None:
        """Update the requests of a step of decodes, some of which have drafts.

        Row by row, each sequence goes through an ordinary decode. It goes on to its next row if
        the chosen token is the draft's.
        `at_once`: choose from all rows beforehand, as far as they do not depend on other tokens.
        That takes one wait for a device instead of one for each row of the longest draft.
        """
        together: list[_Rows] = []
        in_turn: list[_Rows] = []
        end = 0
        for chunk in chunks:
            state = self._requests.of(chunk.sequence)
            if state.drafter is not None:
                state.drafter.computed(chunk.draft)
            if self._right_drafts is not None:
                self._right_drafts.begin(chunk.sequence, end)
            is_together = at_once and state.is_memoryless
            (together if is_together else in_turn).append(_Rows(state, chunk, end))
            end += chunk.num_tokens
        if together:
            self._verify(together, self._chosen_at_once(together, logits_RV))

        def process_row(states: Sequence[RequestState], rows: Sequence[int]) -> None:
            chosen_RV = logits_RV[rows[0] : rows[0] + 1]
            if len(rows) > 1:
                chosen_RV = rows_at(logits_RV, rows)
            self._process_row(states, chosen_RV)

        self._verify(in_turn, process_row)
        if self._right_drafts is not None:
            self._right_drafts.after_rows(chunk.sequence for chunk in chunks)

    def _verify(
        self,
        live: Sequence[_Rows],
        process_row: Callable[[Sequence[RequestState], Sequence[int]], None],
    ) -> None:
        """Update requests row by row, each as long as its draft is right.

        `process_row`: updates requests from one row of the logits each.
        """
        depth = 0
        while live:
            if depth and self._right_drafts is not None:
                self._right_drafts.before_row([each.state.sequence for each in live])
            process_row([each.state for each in live], [each.begin + depth for each in live])
            live = [each for each in live if self._is_right(each.state, each.chunk, depth)]
            depth += 1

    def _chosen_at_once(
        self, drafted: Sequence[_Rows], logits_RV: Tensor
    ) -> Callable[[Sequence[RequestState], Sequence[int]], None]:
        """Choose a token from every row; return the function that adds those of some rows."""
        wanted = [
            (begin + depth, state, depth)
            for state, chunk, begin in drafted
            for depth in range(chunk.num_tokens)
        ]
        places, states, depths = zip(*wanted, strict=True)
        with self._clock.part("sample"):
            is_finite_R, token_ids = choose_tokens(logits_RV, places, states, depths)
        chosen = dict(zip(places, token_ids, strict=True))

        def process_row(states: Sequence[RequestState], rows: Sequence[int]) -> None:
            is_finite = [is_finite_R[row] for row in rows]
            self.add_tokens(states, is_finite, [chosen[row] for row in rows])

        return process_row

    def _process_row(self, states: Sequence[RequestState], logits_RV: Tensor) -> None:
        """Update requests from one row each, as that of an ordinary decode."""
        if all(state.is_plain for state in states):
            self.process_decodes(states, logits_RV)
            return
        sequences = [state.sequence for state in states]
        chunks = [
            Chunk(each, each.num_computed, 1, each.tier, is_decode=True) for each in sequences
        ]
        self.process(chunks, states, logits_RV)

    def _is_right(self, state: RequestState, chunk: Chunk, depth: int) -> bool:
        """Return whether the draft's token at a depth was chosen, and the answer goes on."""
        if depth >= len(chunk.draft) or not self._requests.is_live(state):
            return False
        return bool(state.sequence.token_ids[-1] == chunk.draft[depth])

    def add_tokens(
        self, states: Sequence[RequestState], is_finite_R: Sequence[bool], token_ids: Sequence[int]
    ) -> None:
        """Update the requests of a step of plain decodes from the token of each row."""
        if NO_TOKEN in token_ids:
            self._fail_without_token(states, token_ids)
            live = [row for row, token_id in enumerate(token_ids) if token_id != NO_TOKEN]
            states = [states[row] for row in live]
            is_finite_R = [is_finite_R[row] for row in live]
            token_ids = [token_ids[row] for row in live]
        if not all(is_finite_R):
            for state, is_finite in zip(states, is_finite_R, strict=True):
                if not is_finite:
                    self._fail(state)
        outputs = []
        with self._clock.part("detokenize"):
            for state, is_finite, token_id in zip(states, is_finite_R, token_ids, strict=True):
                if is_finite:
                    self._scheduler.decoded(state.sequence)
                    outputs.append((state, _output(state, token_id, None)))
        with self._clock.part("deliver"):
            now = time.monotonic()
            for state, output in outputs:
                self._requests.note_token(state, now)
                self._requests.deliver(state, output)

    def _fail_without_token(self, states: Sequence[RequestState], token_ids: Sequence[int]) -> None:
        for state, token_id in zip(states, token_ids, strict=True):
            if token_id == NO_TOKEN:
                self._requests.fail(state, "its next token cannot be sampled")

    def _fail(self, state: RequestState) -> None:
        """End a request whose logits are not finite, and no longer trust the prefix cache."""
        self._scheduler.invalidate_prefix_cache()
        self._observer.nan_aborted(state.sequence.request)
        self._requests.fail(state, "the model answered with NaN or Inf")

    def _record(self, computed: ComputedChunk, logits_RV: Tensor | None) -> None:
        """Record a chunk as computed: its prompt's logprobs, its pages and its progress."""
        chunk, state, rows, _ = computed
        if chunk.is_scored:
            assert logits_RV is not None, "a scored prompt was launched"
            with self._clock.part("sample"):
                state.answer.score_prompt(chunk, logits_RV[rows])
        self._scheduler.computed(chunk)
        if chunk.sequence.request.wants_progress and not chunk.sequence.num_generated:
            with self._clock.part("deliver"):
                self._requests.deliver(state, Output(progress=state.progress))

    def _outputs(self, new_tokens: Sequence[_NewToken], logits_RV: Tensor | None) -> list[Output]:
        """Add the tokens to their answers, and return the outputs, with requested logprobs."""
        with self._clock.part("sample"):
            reported = _reported_logprobs(new_tokens, logits_RV)
        with self._clock.part("detokenize"):
            return [
                _output(state, token_id, reported.get(row)) for state, row, token_id in new_tokens
            ]


def _computed(chunks: Collection[Chunk], states: Sequence[RequestState]) -> list[ComputedChunk]:
    """Return the chunks of a step with their requests and rows of logits."""
    computed, row = [], 0
    for chunk, state in zip(chunks, states, strict=True):
        end = row + len(chunk.logit_rows)
        computed.append(ComputedChunk(chunk, state, slice(row, end), chunk.is_last))
        row = end
    return computed


def _split(
    computed: Sequence[ComputedChunk],
) -> tuple[list[ComputedChunk], list[_Ending]]:
    """Return the chunks whose last row is sampled, and the requests that end without a token."""
    sampled: list[ComputedChunk] = []
    endings: list[_Ending] = []
    for each in computed:
        if not each.is_last:
            continue
        is_plain = each.chunk.is_decode and each.state.constraint is None
        last_output = None if is_plain else _end_before(each.state)
        if last_output is None:
            sampled.append(each)
        else:
            endings.append(_Ending(each.state, last_output))
    return sampled, endings


def _output(state: RequestState, token_id: int, logprob: TokenLogprob | None) -> Output:
    """Add a new token to its answer, and return the output.

    A fault of the tokenizer or the grammar ends this request only.
    """
    state.add_token(token_id)
    if state.drafter is not None:
        state.drafter.chosen(token_id)
    try:
        is_complete = state.constraint is not None and state.constraint.advance(token_id)
        placed = state.sequence.placed
        return state.answer.add(token_id, logprob, placed, is_complete=is_complete)
    except GrammarError as error:
        return _grammar_fault(state, error)
    except Exception as error:  # noqa: BLE001  # whatever a tokenizer may raise
        return _fault(state, error, "while decoding a token")


def _end_before(state: RequestState) -> Callable[[], Output] | None:
    """Return the function that ends the answer without another token; None if it continues.

    Also computes the tokens that the answer's grammar allows next.
    """
    if state.sequence.request.sampling.max_tokens == 0:
        return state.answer.end_without_tokens
    if state.constraint is None:
        return None
    try:
        return None if state.constraint.look() else state.answer.complete
    except GrammarError as error:
        return partial(_grammar_fault, state, error)
    except Exception as error:  # noqa: BLE001  # a fault of this request's grammar only
        return partial(_fault, state, error, "in a grammar")


def _reported_logprobs(
    new_tokens: Sequence[_NewToken], logits_RV: Tensor | None
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


def _fault(state: RequestState, error: Exception, where: str) -> Output:
    _log.error("answer_failed", request_id=state.sequence.request.request_id, exc_info=error)
    return Output(finish_reason=FinishReason.ERROR, error=f"{type(error).__name__} {where}")


def _grammar_fault(state: RequestState, error: GrammarError) -> Output:
    # Not the server's fault: a client chooses its grammar, and some fail late in an answer.
    _log.warning("grammar_failed", request_id=state.sequence.request.request_id, error=str(error))
    return Output(finish_reason=FinishReason.REFUSED, error=str(error))
