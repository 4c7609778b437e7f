"""A checked request on its way into the engine, with places in the queue."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.engine.admission import Places
from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.runner.bad_words import BARRED
from ropewalk.model_runtime.text.grammar import Grammar
from ropewalk.server.access.assigned_ids import Seeds
from ropewalk.server.access.open_request import AnswerWatch, current_request, key_name
from ropewalk.server.api.generation_schema import GenerationRequest
from ropewalk.server.api.output_queue import Submission

if TYPE_CHECKING:
    from ropewalk.server.api.service import Service  # which makes reservations

MAX_UNREAD = 16_384  # outputs that the client of a stream may lag behind


@dataclass(frozen=True, slots=True)
class Reservation:
    """A checked request with places in the queue."""

    service: "Service"
    body: GenerationRequest
    deployment: Deployment
    sampling: SamplingParams  # without max_tokens and seed
    places: Places
    arrived: float  # time.monotonic()

    def submit(
        self,
        prompts: Sequence[tuple[int, ...]],
        grammar: Grammar | None = None,
        shown_ids: frozenset[int] = frozenset(),
        masked_id: int | None = None,
        predicted_ids: Sequence[int] = (),
    ) -> Submission:
        """Place and queue the prompts, all or none. Raises what tiers and engine raise.

        `shown_ids` are special tokens that the answers' text contains, `masked_id` a token that the
        answers must not have. `predicted_ids` are tokens that the answers probably contain.
        """
        sampling, body = self.sampling, self.body
        if body.truncate_prompt_tokens is not None:
            num_last = self._num_last(body.truncate_prompt_tokens)
            prompts = [prompt[-num_last:] for prompt in prompts]
        if body.shows_special:
            shown_ids |= frozenset(self.service.tokenizer.special_ids.values())
        if masked_id is not None and masked_id < self.service.vocab_size:
            masked = (masked_id, BARRED)
            sampling = replace(sampling, logit_bias=(*sampling.logit_bias, masked))
        seeds = Seeds()
        requests = [
            request
            for prompt in prompts
            for request in self._requests(prompt, sampling, grammar, shown_ids, seeds)
        ]
        for prompt in prompts:  # none is too long; the maximum of a million takes 25 ms
            # A tokenizer may have more tokens than the model has rows.
            self.service.check_token_id(max(prompt, default=0), body.prompt_field)
        if predicted_ids:
            predicted = self._predicted(predicted_ids)
            requests = [replace(each, prediction_ids=predicted) for each in requests]
        with self._watched(requests, sum(map(len, prompts))):
            return Submission(
                self.service.engine,
                self.service.output_queue,
                requests,
                self.arrived,
                self.places,
                max_unread=MAX_UNREAD,
                stream_interval=self.service.settings.stream_interval,
            )

    def _num_last(self, asked: int) -> int:
        """Return how many last tokens of a prompt are kept; -1 asks for those that fit."""
        if asked != -1:
            return asked
        room = self.deployment.longest_prompt(self._rope, self._max_tokens)
        return max(1, room)

    @property
    def _max_tokens(self) -> int | None:
        """Return max_tokens of the body within the operator's bound; None: the body has none."""
        asked, most = self.body.asked_max_tokens, self.service.max_new_tokens
        return asked if asked is None or most is None else min(asked, most)

    @property
    def _rope(self) -> RopeRequest:
        return RopeRequest() if self.body.rope is None else self.body.rope.request()

    def _predicted(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the beginning of a prediction that an answer can follow."""
        service = self.service
        first_ids = token_ids[: service.max_len]
        return tuple(takewhile(lambda each: each < service.vocab_size, first_ids))

    def _cache_salt(self) -> str:
        """Return the salt of the page keys: the API key's name, then the request's own salt.

        A name has no colon, so no salt of a client can give the pages of another name.
        """
        owner = "" if self.service.settings.share_prefixes else key_name()
        return f"{owner}:{self.body.cache_salt or ''}"

    @contextmanager
    def _watched(self, requests: Sequence[Request], num_prompt_tokens: int) -> Iterator[None]:
        """Tell the open request, if there is one, of what the block submits."""
        opened, metrics = current_request(), self.service.metrics
        if opened is None or not isinstance(metrics, AnswerWatch):
            yield
            return
        metrics.watch(requests, opened, self.body.num_answers)
        try:
            yield
        except BaseException:
            metrics.forget(requests)
            raise
        opened.submitted(len(requests), num_prompt_tokens)

    def _requests(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        grammar: Grammar | None,
        shown_ids: frozenset[int],
        seeds: Seeds,
    ) -> list[Request]:
        """Build one engine request for each answer to a prompt."""
        body, deployment, rope = self.body, self.deployment, self._rope
        seconds = self.service.time_limit(body)
        max_tokens, most = self._max_tokens, f"`{body.max_tokens_field}`"
        # Placed first, so that a prompt which is too long is refused for its length.
        if max_tokens is None:
            bound = self.service.max_new_tokens
            max_tokens, tier_choice = deployment.choose_open(rope, len(prompt), bound)
            most = "the answer's room in the longest context"
        else:
            tier_choice = deployment.choose(rope, len(prompt), max_tokens)
        if max_tokens == self.service.max_new_tokens:
            most = "the server's max_new_tokens"
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"`min_tokens` must be <= {most} ({max_tokens}). Given: {body.min_tokens}",
                param="min_tokens",
            )

        def request(seed: int | None) -> Request:
            return Request(
                f"{body.id_prefix}{uuid.uuid4().hex}",
                prompt,
                replace(
                    sampling, max_tokens=max_tokens, seed=seeds.next() if seed is None else seed
                ),
                tier_choice,
                self._cache_salt(),
                wants_progress=bool(body.return_progress),
                grammar=grammar,
                shown_ids=shown_ids,
                priority=body.priority or 0,
                wants_timings=bool(body.timings_per_token),
                deadline=None if seconds is None else self.arrived + seconds,
            )

        return [request(seed) for seed in body.seeds()]
