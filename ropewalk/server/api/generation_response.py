"""Turns the outputs of one HTTP request into one JSON body or a stream of events.

All generating routes share this module; each one defines its own body formats.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from fastapi import Response
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from ropewalk.model_runtime.errors import (
    EngineStoppedError,
    OutputNotReadError,
    RequestError,
    RopewalkError,
)
from ropewalk.model_runtime.request import FinishReason, Output, Timings
from ropewalk.model_runtime.request import Request as EngineRequest
from ropewalk.rope import Tier
from ropewalk.server.access.assigned_ids import assigned_ids
from ropewalk.server.api.generation_schema import GenerationRequest
from ropewalk.server.api.output_queue import (
    DONE,
    KEEP_ALIVE,
    OPENING,
    EventStream,
    Submission,
    TextEvent,
    event,
    json_bytes,
    until_disconnect,
)
from ropewalk.server.api.parts.logprobs import PromptLogprob, PromptLogprobs
from ropewalk.server.api.parts.usage import (
    PromptProgressAnswer,
    PromptTokensDetails,
    TimingsAnswer,
    Usage,
)
from ropewalk.server.api.rope_schema import RopeAnswer
from ropewalk.server.api.service import Service
from ropewalk.server.errors import error_body
from ropewalk.server.middleware.auth import given_id

_MOST_TOGETHER = 32  # outputs; a bound on the memory of a stream whose client lags
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; vLLM's number for it

BodyT = TypeVar("BodyT", bound=GenerationRequest)
Result = TypeVar("Result")


@dataclass(slots=True)
class ChoiceState:
    """The state of one choice."""

    request: EngineRequest
    num_generated: int = 0
    num_cached_tokens: int = 0
    drafts: tuple[int, int] = (0, 0)  # tokens that were chosen, and those that were not
    # A stream without logprobs has these: tier and number of rescales of the event before, and the
    # event that repeats it with another text.
    scaling: tuple[Tier | None, int] | None = None
    text_event: TextEvent | None = None
    has_told_prompt: bool = False  # of a body that asks for token ids
    timings: Timings | None = None  # of a body that asks for them


class HttpAnswer(ABC, Generic[BodyT]):
    """A collector of outputs; subclasses convert them into the formats of their API."""

    def __init__(self, service: Service, submission: Submission, body: BodyT) -> None:
        self.service = service
        self.body = body
        told = assigned_ids()
        self.created = int(time.time()) if told is None else told.created
        # Clients know the answer by this id, and the engine its choices by theirs.
        self.own_id = submission.requests[0].request_id
        if told is not None:
            self.own_id = f"{body.id_prefix}{told.number}"
        # A client may give several answers the same id, so nothing else depends on this one.
        self.request_id = self.own_id
        if body.request_id is not None:
            self.request_id = f"{body.id_prefix}{body.request_id}"
        self.choices = [ChoiceState(request) for request in submission.requests]
        self._submission = submission
        # Hears of each output before it is answered.
        self.listener: Callable[[int, Output], None] | None = None

    @abstractmethod
    def whole_body(self, outputs: Sequence[Output]) -> BaseModel | dict[str, Any]:
        """Build the answer; `outputs` has one complete output for each choice."""

    @abstractmethod
    async def output_events(self, index: int, output: Output) -> bytes:
        """Return the events of one output of one choice."""

    def first_events(self) -> bytes:
        return OPENING

    def silent_event(self) -> bytes:
        return KEEP_ALIVE

    @abstractmethod
    def error_events(self, error: RopewalkError) -> bytes:
        """Return the events of a failure after the first byte."""

    def last_events(self) -> bytes:
        return b""

    @property
    def model(self) -> str:
        return self.choices[0].request.tier_choice.deployment

    def close(self) -> None:
        """Abort what has not finished; call it once the answer is sent."""
        self._submission.close()

    def rope(self, index: int, output: Output) -> RopeAnswer:
        """Return the scaling applied to one choice so far."""
        state = self.choices[index]
        request = state.request
        tier_choice = request.tier_choice
        tier = output.tier or tier_choice.tier
        ended_by: Literal["tier", "max_model_len"] | None = None
        is_cut = output.finish_reason is FinishReason.LENGTH
        most = request.sampling.max_tokens
        is_full = state.num_generated == most  # not when the time is over
        is_open = self.body.asked_max_tokens is None and most != self.service.max_new_tokens
        if is_open and is_cut and is_full:
            ended_by = "tier" if request.num_positions >= tier.ceiling else "max_model_len"
        num_positions = request.positions_with(state.num_generated)
        return RopeAnswer.of(
            tier_choice,
            tier,
            output.num_rescales,
            num_positions,
            ended_by,
            has_same_bits=self.service.has_same_bits,
        )

    def token_ids(self, output: Output) -> list[int] | None:
        return list(output.token_ids) if self.body.return_token_ids else None

    def shows_prompt(self, index: int) -> bool:
        """Return whether the next event of a choice has the prompt's tokens."""
        return bool(self.body.return_token_ids) and not self.choices[index].has_told_prompt

    def prompt_token_ids(self, index: int) -> list[int] | None:
        """Return the tokens of a choice's prompt at the first call, if the body asks for them."""
        if not self.shows_prompt(index):
            return None
        state = self.choices[index]
        state.has_told_prompt = True
        return list(state.request.prompt_ids)

    def timings(self) -> TimingsAnswer | None:
        """Return the times of the only answer so far, if the body asks for them."""
        state = self.choices[0]
        if state.timings is None:
            return None
        num_prompt = len(state.request.prompt_ids)
        return TimingsAnswer.of(
            state.timings, state.num_cached_tokens, num_prompt, state.num_generated
        )

    def prompt_logprobs(self, output: Output) -> PromptLogprobs | None:
        """Return the logprobs of the prompt's tokens in vLLM's shape, if the body asks for them."""
        num_top = self.body.prompt_logprobs
        if num_top is None:
            return None
        return [
            None if each is None else PromptLogprob.by_token(each, num_top, self._told)
            for each in output.prompt_logprobs
        ]

    def _told(self, token_id: int, logprob: float, rank: int | None) -> PromptLogprob:
        text = self.service.tokenizer.token_text(token_id)
        return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=text)

    async def whole(self) -> Response:
        """Return the whole answer at once, in the order of the prompts."""
        outputs: list[list[Output]] = [[] for _ in self.choices]
        while not self._submission.is_over:
            await self._submission.has_output(None)
            for index, output in self._ready():
                outputs[index].append(output)
        # Off the event loop, because an echoed long prompt with logprobs takes megabytes.
        content = await asyncio.to_thread(
            lambda: json_bytes(self.whole_body([_joined(each) for each in outputs]))
        )
        return Response(content, media_type="application/json")

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer piece by piece; an error after the first byte is its own event.

        Events that are ready together are sent together.
        """
        yield self.first_events()
        limit_s = self.service.settings.sse_keep_alive_seconds or None
        error: RopewalkError | None = None
        sent_at = time.monotonic()
        while error is None and not self._submission.is_over:
            if not await self._submission.has_output(limit_s):
                yield self.silent_event()
                sent_at = time.monotonic()
                continue
            events = []
            try:
                for index, output in self._ready():
                    events.append(await self.output_events(index, output))
            except (EngineStoppedError, OutputNotReadError, RequestError) as found:
                error = found
                events.append(self.error_events(error))
            # Outputs of a call that is held back are no events, and yet break the silence above.
            is_late = limit_s is not None and time.monotonic() - sent_at >= limit_s
            if sending := b"".join(events) or (self.silent_event() if is_late else b""):
                yield sending
                sent_at = time.monotonic()
        if error is None:
            yield self.last_events()

    def usage(self) -> Usage:
        """Return the token counts of every answer; a prompt counts once."""
        return _usage(self.choices[:: self.body.num_answers], self.choices)

    def _ready(self) -> Iterator[tuple[int, Output]]:
        """Yield (choice, output) of events that are ready; an output has all tokens of its event.

        Raises EngineStoppedError, OutputNotReadError, or RequestError if the request's grammar
        cannot continue, or RequestTimeoutError if no answer has begun in its time.
        """
        for index, outputs in self._submission.ready(_MOST_TOGETHER):
            noted = [self._noted(index, each) for each in outputs]
            yield index, _joined(noted)

    def _noted(self, index: int, given: Output) -> Output:
        """Return an output of one token after it was counted and heard. Raises as `_ready`."""
        output = self._in_time(given)
        if output.finish_reason is FinishReason.ERROR:
            kind = OutputNotReadError if self._submission.is_unread else EngineStoppedError
            raise kind(f"The request failed: {output.error}.")
        state = self.choices[index]
        if output.finish_reason is FinishReason.REFUSED:
            grammar = state.request.grammar
            field = self.body.own_name(None if grammar is None else grammar.field)
            raise RequestError(f"`{field}`: {output.error}", param=field)
        state.num_generated += len(output.token_ids)
        state.num_cached_tokens = output.num_cached_tokens
        state.timings = output.timings
        if output.finish_reason is not None:
            state.drafts = output.drafts
        if self.listener is not None:
            self.listener(index, output)
        return output

    def _in_time(self, output: Output) -> Output:
        """Return the output; a choice without a token ends as the others do, if one has begun.

        Raises RequestTimeoutError if none has.
        """
        if output.finish_reason is not FinishReason.TIMEOUT:
            return output
        if not any(state.num_generated for state in self.choices):
            raise self.service.out_of_time(self.body)
        return output._replace(finish_reason=FinishReason.LENGTH)


class ChunkAnswer(HttpAnswer[BodyT]):
    """An answer whose stream has chunks with choices, as OpenAI's older routes have."""

    chunk_model: ClassVar[type[BaseModel]]

    @abstractmethod
    def piece(self, index: int, output: Output) -> BaseModel:
        """Build the body of one output of one choice."""

    def own_fields(self) -> Mapping[str, Any]:
        """Return what only this route's events with choices have."""
        return {}

    def event_body(
        self,
        choices: Sequence[Any],
        *,
        usage: Usage | None = None,
        progress: PromptProgressAnswer | None = None,
    ) -> BaseModel:
        """Build an event with these choices, or with none."""
        return self.chunk_model(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=list(choices),
            usage=usage,
            timings=self.timings() if choices else None,
            prompt_progress=progress,
            **(self.own_fields() if choices else {}),
        )

    def error_events(self, error: RopewalkError) -> bytes:
        return event(error_body(error)) + DONE

    def last_events(self) -> bytes:
        counts = event(self.event_body([], usage=self.usage())) if self.body.includes_usage else b""
        return counts + DONE

    async def output_events(self, index: int, output: Output) -> bytes:
        """Return the event of one output."""
        if output.progress is not None:
            prompt = index // self.body.num_answers
            progress = PromptProgressAnswer.of(prompt, output.progress)
            return event(self.event_body([], progress=progress))
        if output.prompt_logprobs or self.shows_prompt(index):  # as large as a whole answer
            return await asyncio.to_thread(self._piece_event, index, output)
        state = self.choices[index]
        scaling = (output.tier, output.num_rescales)
        if state.scaling == scaling and output.finish_reason is None:
            if state.text_event is None:
                state.text_event = TextEvent.of(
                    lambda text: self.event_body([self.piece(index, output._replace(text=text))])
                )
            return state.text_event.with_text(output.text)
        is_alike = self.body.num_logprobs is None and self.listener is None
        body = self.body
        differs = body.return_token_ids or body.timings_per_token or body.includes_usage_in_each
        if is_alike and not differs:
            # The next event is like this one, except that only the first has a role or an echo.
            state.scaling, state.text_event = scaling, None
        return self._piece_event(index, output)

    def pieces(self, index: int, output: Output) -> Sequence[BaseModel]:
        """Build the bodies of one output of one choice; none if there is nothing to send yet."""
        return [self.piece(index, output)]

    def _piece_event(self, index: int, output: Output) -> bytes:
        found, usage = self.pieces(index, output), None
        if self.body.includes_usage_in_each:
            state = self.choices[index]
            usage = _usage([state], [state])
        return b"".join([event(self.event_body([piece], usage=usage)) for piece in found])


def name_request(http: HttpRequest, request_id: str | None) -> None:
    """Give a request the id of its body in headers and logs, unless its head has one."""
    if request_id is not None and given_id(http.scope) is None:
        http.scope["state"]["request_id"] = request_id


async def respond(http: HttpRequest, answer: HttpAnswer[Any]) -> Response:
    """Return the whole answer or a stream, as the body requests.

    If the client disconnects, the request is aborted.
    """
    if answer.body.stream:
        return EventStream(answer.events(), answer.close)
    try:
        return await until_disconnect(http, answer.whole())
    finally:
        answer.close()


def _usage(prompts: Sequence[ChoiceState], choices: Sequence[ChoiceState]) -> Usage:
    """Return the token counts of some choices; `prompts` has one choice of each prompt."""
    num_prompt = sum(len(state.request.prompt_ids) for state in prompts)
    num_generated = sum(state.num_generated for state in choices)
    num_cached = sum(state.num_cached_tokens for state in prompts)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )


def finish_reason(output: Output) -> str | None:
    """Return OpenAI's finish reason, which is in the last output only."""
    return None if output.finish_reason is None else output.finish_reason.value


def finite(logprob: float) -> float:
    """Return a logprob that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)


def _joined(outputs: Sequence[Output]) -> Output:
    """Return one output with the tokens of all; the rest is the last one's."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    return last._replace(
        text="".join(each.text for each in outputs),
        token_ids=tuple(token_id for each in outputs for token_id in each.token_ids),
        logprobs=tuple(entry for each in outputs for entry in each.logprobs),
        prompt_logprobs=tuple(entry for each in outputs for entry in each.prompt_logprobs),
    )
