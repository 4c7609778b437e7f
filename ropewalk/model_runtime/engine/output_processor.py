"""The growing answer of one request: text, reported logprobs and finish reason.

Shapes: R = rows of logits, V = vocabulary.
"""

from collections import deque

from torch import Tensor

from ropewalk.model_runtime.request import FinishReason, Output, Request, TokenLogprob
from ropewalk.model_runtime.runner.sampler import logprobs
from ropewalk.model_runtime.scheduling.step_plan import Chunk
from ropewalk.model_runtime.text.detokenizer import Detokenizer
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.rope import Tier


class Answer:
    """The outputs of one request.

    They end at an end token, a stop string, max_tokens, or when the request's time is over.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer, eos_token_ids: frozenset[int]
    ) -> None:
        self._params = request.sampling
        own = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self.end_ids = own | frozenset(request.sampling.stop_token_ids)
        shown_stop = request.sampling.shown_stop
        self._shows_end = shown_stop is not None
        self._detokenizer = Detokenizer(
            tokenizer,
            request.prompt_ids,
            request.sampling.stop,
            request.shown_ids,
            shown_stop or frozenset(),
        )
        # The first token has no predecessor, so it has no logprob.
        wanted = request.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprob | None] = [None] if wanted else []
        self._num_generated = 0
        self._num_sent = 0  # characters
        # Logprobs that wait for their token's text, each with the character that it begins at.
        self._held: deque[tuple[int, TokenLogprob]] = deque()

    def score_prompt(self, chunk: Chunk, logits_RV: Tensor) -> None:
        """Add the logprobs of a prompt chunk; the next output contains them.

        Each row gives the logprob of the next token. The last row of the prompt has no next token.
        A sequence that was preempted in its prompt has delivered its first logprobs already.
        """
        sequence = chunk.sequence
        first = max(chunk.first, sequence.num_scored)
        end = min(chunk.end, sequence.num_prompt_tokens)
        following = sequence.request.prompt_ids[first + 1 : end + 1]
        num_top = [sequence.request.sampling.prompt_logprobs or 0] * len(following)
        self._prompt_logprobs += logprobs(logits_RV[: len(following)], following, num_top)
        sequence.num_scored = max(sequence.num_scored, end)

    def end_without_tokens(self) -> Output:
        """Return the only output of a request with max_tokens 0."""
        return Output(
            prompt_logprobs=self._take_prompt_logprobs(), finish_reason=FinishReason.LENGTH
        )

    def complete(self) -> Output:
        """Return the last output of an answer that is complete without an end token."""
        return self._ended(FinishReason.STOP)

    def out_of_time(self) -> Output:
        """Return the last output of an answer whose time is over."""
        if not self._num_generated:
            return Output(finish_reason=FinishReason.TIMEOUT)
        return self._ended(FinishReason.LENGTH)

    def _ended(self, reason: FinishReason) -> Output:
        return Output(
            text=self._detokenizer.flush(),
            logprobs=self._take_held(),
            prompt_logprobs=self._take_prompt_logprobs(),
            finish_reason=reason,
        )

    def add(
        self,
        token_id: int,
        logprob: TokenLogprob | None,
        placed: tuple[int, Tier | None, int] = (0, None, 0),
        *,
        is_complete: bool = False,
    ) -> Output:
        """Return the output of one generated token.

        `placed`: the cached tokens, the tier and the tier changes of its sequence.
        `is_complete`: the answer ends with this token.
        """
        num_generated = self._num_generated = self._num_generated + 1
        params, detokenizer = self._params, self._detokenizer
        may_stop = num_generated >= params.min_tokens
        is_end = may_stop and token_id in self.end_ids
        if logprob is not None:
            self._held.append((detokenizer.num_decoded, logprob))
        is_left_out = is_end and not self._shows_end
        text = "" if is_left_out else detokenizer.push(token_id, may_stop=may_stop)
        is_stopped = detokenizer.is_stopped
        reason: FinishReason | None = None
        if is_end or is_complete or is_stopped:
            reason = FinishReason.STOP
        elif num_generated == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None and not is_stopped:
            text += detokenizer.flush()
        self._num_sent += len(text)
        logprobs: tuple[TokenLogprob, ...] = ()
        cut_logprobs: tuple[TokenLogprob, ...] = ()
        if self._held:
            # Without stop strings no text is taken back, so no logprob has to wait for it.
            is_settled = not params.stop or (reason is not None and not is_stopped)
            logprobs = self._take_held() if is_settled else self._take_sent()
            cut_logprobs = self._take_held() if is_stopped else ()
        prompt_logprobs = self._take_prompt_logprobs() if self._prompt_logprobs else ()
        # Arguments by position take half the time of named ones.
        stop_string = detokenizer.stop_string
        return Output(
            text, (token_id,), logprobs, cut_logprobs, prompt_logprobs, reason, stop_string, *placed
        )

    def _take_sent(self) -> tuple[TokenLogprob, ...]:
        """Return the held logprobs of tokens whose text has begun to be sent."""
        taken = []
        while self._held and self._held[0][0] < self._num_sent:
            taken.append(self._held.popleft()[1])
        return tuple(taken)

    def _take_held(self) -> tuple[TokenLogprob, ...]:
        taken = tuple(logprob for _, logprob in self._held)
        self._held.clear()
        return taken

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        taken, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return taken
