"""POST /v1/chat/completions."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from model_runtime.errors import RequestError
from model_runtime.request import Output
from server.api.chat_schema import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    Delta,
    TokenLogprobs,
    TopLogprob,
)
from server.api.generation_response import HttpAnswer, finish_reason, finite, respond
from server.api.generation_schema import PromptProgressAnswer, Usage
from server.api.json_body import JsonBodyRoute
from server.api.output_queue import Submission
from server.api.service import Service


def chat_router(service: Service) -> APIRouter:
    """Build a router with the route over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    @router.post("/v1/chat/completions", response_model=ChatResponse)
    async def chat(body: ChatRequest, http: Request) -> Response:
        async with service.reserve(body, service.chat_template.stop) as reservation:
            prompt = await _tokenize(service, body)
            submission = reservation.submit([prompt])
        return await respond(http, _ChatAnswer(service, submission, body))

    return router


async def _tokenize(service: Service, body: ChatRequest) -> tuple[int, ...]:
    """Render the messages into the tokens of one prompt. Raises RequestError."""
    variables = body.chat_template_kwargs or {}
    _check_variables(service, variables)
    messages = [message.for_template() for message in body.messages]
    if not service.chat_template.reads_names and any("name" in each for each in messages):
        raise RequestError(
            "`name` of a message is not read by this model's chat template, remove it",
            param="messages",
        )
    service.check_length(sum(len(message["content"]) for message in messages), "messages")
    text = await asyncio.to_thread(
        service.chat_template.render,
        messages,
        add_generation_prompt=body.opens_answer,
        continue_final_message=body.continue_final_message,
        variables=variables,
    )
    # Templates write the special tokens themselves, except for the fallback.
    add_special_tokens = body.add_special_tokens or service.chat_template.is_fallback
    return await service.tokenize(text, add_special_tokens=add_special_tokens, param="messages")


def _check_variables(service: Service, variables: Iterable[str]) -> None:
    """Check that the operator allows each variable and that the template reads it."""
    allowed = service.settings.allowed_chat_template_kwargs
    for name in variables:
        if name not in allowed:
            raise RequestError(
                f"`chat_template_kwargs` may hold {', '.join(sorted(allowed)) or 'nothing'}. "
                f"Given: {name[:64]!a}",
                param="chat_template_kwargs",
            )
        if name not in service.chat_template.variables:
            raise RequestError(
                f"`chat_template_kwargs.{name}` is not read by this model's chat template",
                param="chat_template_kwargs",
            )


class _ChatAnswer(HttpAnswer[ChatRequest]):
    """An answer in OpenAI's chat format."""

    def __init__(self, service: Service, submission: Submission, body: ChatRequest) -> None:
        super().__init__(service, submission, body)
        self._has_begun = [False for _ in submission.requests]

    def whole_body(self, outputs: Sequence[Output]) -> ChatResponse:
        """Build the body with every choice."""
        return ChatResponse(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AnswerMessage(content=output.text),
                    logprobs=self._logprobs(output),
                    finish_reason=finish_reason(output),
                    rope=self.rope(index, output),
                )
                for index, output in enumerate(outputs)
            ],
            usage=self.usage(),
        )

    def piece(self, index: int, output: Output) -> ChunkChoice:
        """Build one choice's next piece; the first one contains the role."""
        is_first, self._has_begun[index] = not self._has_begun[index], True
        return ChunkChoice(
            index=index,
            delta=Delta(role="assistant" if is_first else None, content=output.text),
            logprobs=self._logprobs(output),
            finish_reason=finish_reason(output),
            rope=self.rope(index, output),
        )

    def event_body(
        self,
        choices: Sequence[ChunkChoice],
        *,
        usage: Usage | None = None,
        progress: PromptProgressAnswer | None = None,
    ) -> ChatChunk:
        """Build OpenAI's chunk."""
        return ChatChunk(
            id=self.request_id,
            created=self.created,
            model=self.model,
            choices=list(choices),
            usage=usage,
            prompt_progress=progress,
        )

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprobs(
                    **self._scored(entry.token_id, entry.logprob),
                    top_logprobs=[TopLogprob(**self._scored(*each)) for each in entry.top],
                )
                for entry in output.logprobs
            ]
        )

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        tokenizer = self.service.tokenizer
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }
