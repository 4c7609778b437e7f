"""Turns the outputs of one HTTP request into one JSON body or a stream of events.

All generating routes share this module; each one defines its own body formats.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from fastapi import Response
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from model_runtime.errors import EngineStoppedError
from model_runtime.request import FinishReason, Output
from model_runtime.request import Request as EngineRequest
from server.access.refusals import ClientDisconnectedError
from server.api.generation_schema import (
    GenerationRequest,
    PromptProgressAnswer,
    PromptTokensDetails,
    RopeAnswer,
    Usage,
)
from server.api.output_queue import Submission
from server.api.service import Service
from server.api.sse import DONE, KEEP_ALIVE, OPENING, EventStream, event
from server.envelope import envelope

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; vLLM's number for it

BodyT = TypeVar("BodyT", bound=GenerationRequest)
Result = TypeVar("Result")


@dataclass(slots=True)
class ChoiceState:
    """The state of one choice."""

    request: EngineRequest
    num_generated: int = 0
    num_cached_tokens: int = 0


class HttpAnswer(ABC, Generic[BodyT]):
    """A collector of outputs; subclasses convert them into OpenAI's formats."""

    def __init__(self, service: Service, submission: Submission, body: BodyT) -> None:
        self.service = service
        self.body = body
        self.created = int(time.time())
        self.choices = [ChoiceState(request) for request in submission.requests]
        self._submission = submission

    @abstractmethod
    def whole_body(self, outputs: Sequence[Output]) -> BaseModel:
        """Build the answer; `outputs` has one complete output for each choice."""

    @abstractmethod
    def piece(self, index: int, output: Output) -> BaseModel:
        """Build the body of one output of one choice."""

    @abstractmethod
    def event_body(
        self,
        choices: Sequence[Any],
        *,
        usage: Usage | None = None,
        progress: PromptProgressAnswer | None = None,
    ) -> BaseModel:
        """Build an event with these choices, or with none."""

    @property
    def request_id(self) -> str:
        """Return the answer's id, which is that of the first choice."""
        return self.choices[0].request.request_id

    @property
    def model(self) -> str:
        """Return the served name."""
        return self.choices[0].request.placement.deployment

    def close(self) -> None:
        """Abort what has not finished; call it once the answer is sent."""
        self._submission.close()

    def rope(self, index: int, output: Output) -> RopeAnswer:
        """Return the scaling applied to one choice so far."""
        request = self.choices[index].request
        placement = request.placement
        tier = output.tier or placement.tier
        ended_by: Literal["tier", "max_model_len"] | None = None
        if self.body.asked_max_tokens is None and output.finish_reason is FinishReason.LENGTH:
            ended_by = "tier" if request.num_positions >= tier.ceiling else "max_model_len"
        return RopeAnswer.of(placement, tier, output.num_rescales, ended_by)

    async def whole(self) -> Response:
        """Return the whole answer at once, in the order of the prompts."""
        outputs: list[list[Output]] = [[] for _ in self.choices]
        while not self._submission.is_over:
            found = await self._next(None)
            assert found is not None, "nothing limits the wait"
            index, output = found
            outputs[index].append(output)
        # Off the event loop, because an echoed long prompt with logprobs takes megabytes.
        content = await asyncio.to_thread(
            lambda: self.whole_body([_joined(each) for each in outputs]).model_dump_json()
        )
        return Response(content, media_type="application/json")

    async def events(self) -> AsyncIterator[str]:
        """Yield the answer piece by piece; an error after the first byte is its own event."""
        yield OPENING
        try:
            while not self._submission.is_over:
                found = await self._next(self.service.settings.sse_keep_alive_seconds or None)
                yield KEEP_ALIVE if found is None else await self._event(*found)
        except EngineStoppedError as error:
            yield event(envelope(str(error), "server_error", code="engine_stopped"))
            yield DONE
            return
        if self.body.includes_usage:
            yield event(self.event_body([], usage=self.usage()))
        yield DONE

    def usage(self) -> Usage:
        """Return the token counts of every answer; a prompt counts once."""
        firsts = self.choices[:: self.body.num_answers]
        prompt = sum(len(state.request.prompt_ids) for state in firsts)
        generated = sum(state.num_generated for state in self.choices)
        cached = sum(state.num_cached_tokens for state in firsts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    async def _event(self, index: int, output: Output) -> str:
        if output.progress is not None:
            prompt = index // self.body.num_answers
            progress = PromptProgressAnswer.of(prompt, output.progress)
            return event(self.event_body([], progress=progress))
        if output.prompt_logprobs:  # as large as a whole answer
            return await asyncio.to_thread(self._piece_event, index, output)
        return self._piece_event(index, output)

    def _piece_event(self, index: int, output: Output) -> str:
        return event(self.event_body([self.piece(index, output)]))

    async def _next(self, limit_s: float | None) -> tuple[int, Output] | None:
        """Return (choice, output), or None after `limit_s` seconds without any.

        Raises EngineStoppedError.
        """
        found = await self._submission.next_output(limit_s)
        if found is None:
            return None
        index, output = found
        if output.finish_reason is FinishReason.ERROR:
            raise EngineStoppedError(f"The request failed: {output.error}.")
        state = self.choices[index]
        state.num_generated += len(output.token_ids)
        state.num_cached_tokens = output.num_cached_tokens
        return found


async def respond(http: HttpRequest, answer: HttpAnswer[Any]) -> Response:
    """Return the whole answer or a stream, as the body requests.

    If the client disconnects, the request is aborted.
    """
    if answer.body.stream:
        return EventStream(answer.events(), answer.close)
    try:
        return await _until_disconnect(http, answer.whole())
    finally:
        answer.close()


async def _until_disconnect(http: HttpRequest, work: Awaitable[Result]) -> Result:
    """Return the work's result.

    If the client disconnects, cancel the work and raise ClientDisconnectedError.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def finish_reason(output: Output) -> str | None:
    """Return OpenAI's finish reason, which is in the last output only."""
    return None if output.finish_reason is None else output.finish_reason.value


def finite(logprob: float) -> float:
    """Return a logprob that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)


def _joined(outputs: Sequence[Output]) -> Output:
    last = outputs[-1]
    return Output(
        text="".join(each.text for each in outputs),
        token_ids=tuple(token_id for each in outputs for token_id in each.token_ids),
        logprobs=tuple(entry for each in outputs for entry in each.logprobs),
        cut_logprobs=last.cut_logprobs,
        prompt_logprobs=tuple(entry for each in outputs for entry in each.prompt_logprobs),
        finish_reason=last.finish_reason,
        tier=last.tier,
        num_rescales=last.num_rescales,
    )
