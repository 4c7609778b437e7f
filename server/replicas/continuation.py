"""Exact continuation: a request runs again on another replica, and the client notices nothing.

Tokens depend on the request and its seed only, never on the batch or on what is cached. So the
second run gives the same tokens. They are compared with those that were delivered, and skipped.
Text and logprobs follow from the tokens, so as much of them as was delivered is skipped.
"""

from collections.abc import Iterator

from ropewalk.model_runtime.request import FinishReason, Output


class DivergedError(Exception):
    """The second run gave other tokens than the client already has."""


class DeliveredAnswer:
    """The outputs of one request that were delivered, over all of its runs."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_characters = 0
        self._num_logprobs = 0
        self._num_prompt_logprobs = 0
        self._num_computed_tokens = 0  # of the prompt, by the newest progress
        self._num_cached_tokens: int | None = None  # by the first output
        self._is_again = False  # the current run is not the first
        # As much as was delivered before the current run began, and has not come again in it:
        self._tokens_due = self._characters_due = 0
        self._logprobs_due = self._prompt_logprobs_due = 0

    @property
    def has_begun(self) -> bool:
        """Return whether anything was delivered that a second run must repeat."""
        return bool(self._token_ids or self._num_characters or self._num_prompt_logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def begin_again(self) -> None:
        """Expect the same outputs again from the start."""
        self._is_again = True
        self._tokens_due = len(self._token_ids)
        self._characters_due = self._num_characters
        self._logprobs_due = self._num_logprobs
        self._prompt_logprobs_due = self._num_prompt_logprobs

    def take(self, output: Output) -> Iterator[Output]:
        """Yield what of an output is new. Raises DivergedError if it differs from what was sent."""
        if output.finish_reason in {FinishReason.ERROR, FinishReason.REFUSED, FinishReason.ABORT}:
            yield output
            return
        if self._is_again:
            remaining = self._beyond(output)
            if remaining is None:
                return
            output = remaining
        self._token_ids += output.token_ids
        self._num_characters += len(output.text)
        self._num_logprobs += len(output.logprobs)
        self._num_prompt_logprobs += len(output.prompt_logprobs)
        if output.progress is not None:
            self._num_computed_tokens = output.progress.num_computed_tokens
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        yield output

    def _beyond(self, output: Output) -> Output | None:
        """Return the part of an output beyond what was delivered; None if there is none."""
        if output.progress is not None:
            num_computed = output.progress.num_computed_tokens
            is_new = not self._token_ids and num_computed > self._num_computed_tokens
            return output if is_new else None
        num_tokens = min(len(output.token_ids), self._tokens_due)
        start = len(self._token_ids) - self._tokens_due
        if list(output.token_ids[:num_tokens]) != self._token_ids[start : start + num_tokens]:
            raise DivergedError
        num_characters = min(len(output.text), self._characters_due)
        num_logprobs = min(len(output.logprobs), self._logprobs_due)
        num_prompt_logprobs = min(len(output.prompt_logprobs), self._prompt_logprobs_due)
        self._tokens_due -= num_tokens
        self._characters_due -= num_characters
        self._logprobs_due -= num_logprobs
        self._prompt_logprobs_due -= num_prompt_logprobs
        new = output._replace(
            token_ids=output.token_ids[num_tokens:],
            text=output.text[num_characters:],
            logprobs=output.logprobs[num_logprobs:],
            prompt_logprobs=output.prompt_logprobs[num_prompt_logprobs:],
        )
        if new.finish_reason is not None and (self._tokens_due or self._characters_due):
            raise DivergedError  # it ends before the place that the client has read to
        has_news = new.token_ids or new.text or new.logprobs or new.prompt_logprobs
        if not has_news and new.finish_reason is None:
            return None
        if self._num_cached_tokens is not None:  # an answer has one number of cached tokens
            new = new._replace(num_cached_tokens=self._num_cached_tokens)
        return new
