"""POST /v1/completions."""

import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from model_runtime.detokenizer import PROMPT_TAIL
from model_runtime.errors import EngineStoppedError
from model_runtime.request import FinishReason, Output, TokenLogprob
from model_runtime.request import Request as EngineRequest
from model_runtime.tokenizer import TokenStream
from server.errors import envelope
from server.schema import (
    Choice,
    CompletionRequest,
    CompletionResponse,
    Logprobs,
    PromptTokensDetails,
    RopeAnswer,
    Usage,
)
from server.service import Service, Submission, until_disconnect
from server.stream import DONE, EventStream, event

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; vLLM's number for it


def completions_router(service: Service) -> APIRouter:
    """The route, over one service."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=CompletionResponse)
    async def completions(body: CompletionRequest, http: Request) -> Response | CompletionResponse:
        submission = await service.submit(body)
        with ExitStack() as at_the_end:
            at_the_end.callback(submission.close)
            answer = _CompletionAnswer(service, submission, body)
            if not body.stream:
                return await until_disconnect(http, answer.whole())
            close = at_the_end.pop_all().close  # the stream's business from here on
        return EventStream(answer.events(), close)

    return router


class _CompletionAnswer:
    """Turns the outputs of one HTTP request's choices into OpenAI's shapes."""

    def __init__(self, service: Service, submission: Submission, body: CompletionRequest) -> None:
        self._service = service
        self._submission = submission
        self._body = body
        self._created = int(time.time())
        self._choices = [self._state(request) for request in submission.requests]

    def _state(self, request: EngineRequest) -> "_ChoiceState":
        pieces = self._service.tokenizer.stream()
        if not self._body.echo:
            # What a token adds to the text may depend on what is before it.
            for token_id in request.prompt_ids[-PROMPT_TAIL:]:
                pieces.push(token_id)
        return _ChoiceState(request, pieces)

    async def whole(self) -> CompletionResponse:
        """Everything at once, in the order of the prompts."""
        outputs: list[list[Output]] = [[] for _ in self._choices]
        async for index, output in self._outputs():
            outputs[index].append(output)
        choices = []
        for index, of_choice in enumerate(outputs):
            joined = Output(
                text="".join(each.text for each in of_choice),
                token_ids=tuple(token_id for each in of_choice for token_id in each.token_ids),
                logprobs=tuple(entry for each in of_choice for entry in each.logprobs),
                prompt_logprobs=tuple(
                    entry for each in of_choice for entry in each.prompt_logprobs
                ),
                finish_reason=of_choice[-1].finish_reason,
                tier=of_choice[-1].tier,
                num_rescales=of_choice[-1].num_rescales,
            )
            choices.append(self._choice(index, joined))
        return self._response(choices, self._usage())

    async def events(self) -> AsyncIterator[str]:
        """Piece by piece; an error after the first byte is an event of its own."""
        try:
            async for index, output in self._outputs():
                yield event(self._response([self._choice(index, output)]))
        except EngineStoppedError as error:
            yield event(envelope(str(error), "server_error", code="engine_stopped"))
            yield DONE
            return
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event(self._response([], self._usage()))
        yield DONE

    async def _outputs(self) -> AsyncIterator[tuple[int, Output]]:
        async for index, output in self._submission.outputs():
            if output.finish_reason is FinishReason.ERROR:
                raise EngineStoppedError(f"The request failed: {output.error}.")
            state = self._choices[index]
            state.num_generated += len(output.token_ids)
            state.num_cached_tokens = output.num_cached_tokens
            yield index, output

    def _choice(self, index: int, output: Output) -> Choice:
        state = self._choices[index]
        echoed = ""
        if self._body.echo and not state.is_echoed:
            echoed = self._service.tokenizer.decode(list(state.request.prompt_ids))
            state.is_echoed = True
        placement = state.request.placement
        tier = output.tier or placement.tier
        return Choice(
            index=index,
            text=echoed + output.text,
            logprobs=self._logprobs(state, output),
            finish_reason=None if output.finish_reason is None else output.finish_reason.value,
            rope=RopeAnswer.of(placement, tier, output.num_rescales),
        )

    def _logprobs(self, state: "_ChoiceState", output: Output) -> Logprobs | None:
        """The classic shape: the echoed prompt's tokens first, where there are any."""
        if self._body.logprobs is None:
            return None
        prompt_ids = state.request.prompt_ids if output.prompt_logprobs else ()
        entries = [
            *zip(prompt_ids, output.prompt_logprobs, strict=True),
            *zip(output.token_ids, output.logprobs, strict=True),
        ]
        offsets = []
        for token_id, _ in entries:
            offsets.append(state.offset)
            state.offset += len(state.pieces.push(token_id))
        return Logprobs(
            tokens=[self._service.tokenizer.token_text(token_id) for token_id, _ in entries],
            token_logprobs=[None if each is None else _finite(each.logprob) for _, each in entries],
            top_logprobs=[None if each is None else self._top(each) for _, each in entries],
            text_offset=offsets,
        )

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        """Likeliest first, and the token itself, which OpenAI adds where it is not among them."""
        found: dict[str, float] = {}
        for token_id, logprob in (*scored.top, (scored.token_id, scored.logprob)):
            found.setdefault(self._service.tokenizer.token_text(token_id), _finite(logprob))
        return found

    def _usage(self) -> Usage:
        firsts = self._choices[:: self._body.n or 1]  # the first answer to each prompt
        prompt = sum(len(state.request.prompt_ids) for state in firsts)
        generated = sum(state.num_generated for state in self._choices)
        cached = sum(state.num_cached_tokens for state in firsts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def _response(self, choices: list[Choice], usage: Usage | None = None) -> CompletionResponse:
        request = self._choices[0].request
        return CompletionResponse(
            id=request.request_id,
            created=self._created,
            model=request.placement.deployment,
            choices=choices,
            usage=usage,
        )


@dataclass(slots=True)
class _ChoiceState:
    """How far one choice has come."""

    request: EngineRequest
    # Pieces of text for logprobs: one per token, so that offsets add up to the text.
    pieces: TokenStream
    offset: int = 0
    num_generated: int = 0
    num_cached_tokens: int = 0
    is_echoed: bool = False


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
