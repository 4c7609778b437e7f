"""POST /v1/completions."""

import time
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter, Request, Response

from model_runtime.errors import EngineStoppedError
from model_runtime.request import FinishReason, Output, TokenLogprob
from server.errors import envelope
from server.schema import (
    Choice,
    CompletionRequest,
    CompletionResponse,
    Logprobs,
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
        answer = _CompletionAnswer(service, submission, body)
        if body.stream:
            return EventStream(answer.events(), submission.close)
        try:
            return await until_disconnect(http, answer.whole())
        finally:
            submission.close()

    return router


class _CompletionAnswer:
    """Turns one request's outputs into OpenAI's shapes."""

    def __init__(self, service: Service, submission: Submission, body: CompletionRequest) -> None:
        self._service = service
        self._submission = submission
        self._body = body
        self._request = submission.request
        self._rope = RopeAnswer.of(self._request.placement)
        self._created = int(time.time())
        self._num_generated = 0
        # Pieces of text for logprobs: one per token, so that offsets add up to the text.
        self._pieces = service.tokenizer.stream()
        self._offset = 0

    async def whole(self) -> CompletionResponse:
        """Everything at once."""
        outputs = [output async for output in self._outputs()]
        text = "".join(output.text for output in outputs)
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        scored = [each for output in outputs for each in output.logprobs]
        prompt_scored = [each for output in outputs for each in output.prompt_logprobs]
        choice = self._choice(
            self._echoed_text() + text,
            self._logprobs(prompt_scored, token_ids, scored),
            outputs[-1].finish_reason,
        )
        return self._response([choice], self._usage())

    async def events(self) -> AsyncIterator[str]:
        """Piece by piece; an error after the first byte is an event of its own."""
        echoed = self._echoed_text()
        try:
            async for output in self._outputs():
                logprobs = self._logprobs(output.prompt_logprobs, output.token_ids, output.logprobs)
                choice = self._choice(echoed + output.text, logprobs, output.finish_reason)
                echoed = ""
                yield event(self._response([choice]))
        except EngineStoppedError as error:
            yield event(envelope(str(error), "server_error", code="engine_stopped"))
            yield DONE
            return
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield event(self._response([], self._usage()))
        yield DONE

    async def _outputs(self) -> AsyncIterator[Output]:
        async for output in self._submission.outputs():
            if output.finish_reason is FinishReason.ERROR:
                raise EngineStoppedError(f"The request failed: {output.error}.")
            self._num_generated += len(output.token_ids)
            yield output

    def _echoed_text(self) -> str:
        """The prompt's text, where it was asked for."""
        if not self._body.echo:
            return ""
        return self._service.tokenizer.decode(list(self._request.prompt_ids))

    def _logprobs(
        self,
        prompt_scored: Sequence[TokenLogprob | None],
        token_ids: Sequence[int],
        scored: Sequence[TokenLogprob],
    ) -> Logprobs | None:
        """The classic shape: the echoed prompt's tokens first, where there are any."""
        if self._body.logprobs is None:
            return None
        prompt_ids = self._request.prompt_ids if prompt_scored else ()
        entries = [
            *zip(prompt_ids, prompt_scored, strict=True),
            *zip(token_ids, scored, strict=True),
        ]
        offsets = []
        for token_id, _ in entries:
            offsets.append(self._offset)
            self._offset += len(self._pieces.push(token_id))
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

    def _choice(self, text: str, logprobs: Logprobs | None, reason: FinishReason | None) -> Choice:
        return Choice(
            text=text,
            logprobs=logprobs,
            finish_reason=None if reason is None else reason.value,
            rope=self._rope,
        )

    def _usage(self) -> Usage:
        prompt = len(self._request.prompt_ids)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._num_generated,
            total_tokens=prompt + self._num_generated,
        )

    def _response(self, choices: list[Choice], usage: Usage | None = None) -> CompletionResponse:
        return CompletionResponse(
            id=self._request.request_id,
            created=self._created,
            model=self._request.placement.deployment,
            choices=choices,
            usage=usage,
        )


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
