"""The routes about models and tokens, and their bodies."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import ConfigDict, Field
from pydantic_core import to_json

from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.errors import RequestError
from ropewalk.server.api.generation_schema import TokenId
from ropewalk.server.api.output_queue import json_bytes
from ropewalk.server.api.parts.request_fields import ModelField
from ropewalk.server.api.rope_schema import PositionsField
from ropewalk.server.api.service import Service
from ropewalk.server.api.strict_body import Body, FirstMistakes, InPieces
from ropewalk.server.middleware.json_body import JsonBodyRoute
from ropewalk.server.turns.answers.model_answer import (
    CacheEntry,
    Model,
    ModelList,
    ModelMeta,
    ScalingEntry,
    TierEntry,
)
from ropewalk.server.turns.chat_schema import (
    Messages,
    TurnFields,
    problems_of_opening,
    problems_of_results,
)
from ropewalk.server.turns.chat_turn import ChatTurn, prompt_ids, render
from ropewalk.server.turns.tool_schema import call_choice, problems_of_choice

_PIECE = 16384  # tokens; writing them takes a millisecond


_OF_MESSAGES = (
    *("tools", "tool_choice", "reasoning_effort", "continue_final_message"),
    *("chat_template_kwargs", "documents"),
)


class TokenizeRequest(ModelField, TurnFields):
    """POST /tokenize: a text, or the messages of a chat."""

    # One of two fields is required, which a list of required fields cannot say.
    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "text"}]})

    prompt: str | None = Field(None, examples=["Once upon a time"])
    """A text. Needed without `messages`."""
    messages: Messages | None = None
    """The messages of a chat, as in /v1/chat/completions. Needed without `prompt`."""
    add_special_tokens: bool | None = None
    """Adds the special tokens in front. Default: true for a prompt and false for messages, as in
    the routes that generate."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the field that is missing, or that belongs to the other kind."""
        if self.prompt is None and self.messages is None:
            yield "prompt", "is missing, and so is `messages`"
        if self.prompt is not None and self.messages is not None:
            yield "messages", "and `prompt` exclude each other"
        if self.messages is None:
            for name in _OF_MESSAGES:
                if getattr(self, name):
                    yield name, "needs `messages`"
            return
        yield from problems_of_results(self.messages)
        yield from problems_of_choice(self.tools or (), self.tool_choice)
        yield from problems_of_opening(
            self.messages, opens=self.add_generation_prompt, continues=self.continue_final_message
        )


class TokenizeResponse(Body):
    """How a text looks to the model."""

    count: int = Field(examples=[2])
    """Number of the tokens."""
    max_model_len: int = Field(examples=[2048])
    """The longest context of the model, in tokens."""
    tokens: list[int] = Field(examples=[[1, 50]])
    """The ids of the tokens."""


class DetokenizeRequest(ModelField):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True), FirstMistakes, InPieces] = Field(
        examples=[[5, 6]]
    )
    """The ids of the tokens."""
    skip_special_tokens: bool | None = None
    """Leaves special tokens out of the text. Default: false."""


class DetokenizeResponse(Body):
    """Tokens as text."""

    prompt: str = Field(examples=["Once upon a time"])
    """The text."""


class TokenizerInfo(Body):
    """GET /tokenizer_info: what evaluation harnesses ask for."""

    tokenizer_class: str = Field(examples=["LlamaTokenizerFast"])
    """The class of transformers."""
    vocab_size: int = Field(examples=[2048])
    """Number of the tokens that a request may name."""
    bos_token: str | None = Field(examples=["<s>"])
    """The token at the beginning of a text, or null."""
    eos_token: str | None = Field(examples=["</s>"])
    """The token at the end of a text, or null."""
    pad_token: str | None = Field(examples=[None])
    """The token that fills batches elsewhere, or null."""
    unk_token: str | None = Field(examples=[None])
    """The token of an unknown text, or null."""
    chat_template: str = Field(examples=["{% for message in messages %}..."])
    """The template of chats."""


async def _in_json(write: Callable[..., bytes], *args: Any) -> Response:
    """Return an answer that may be long; FastAPI would validate it on the event loop."""
    content = await asyncio.to_thread(write, *args)
    return Response(content, media_type="application/json")


def _with_tokens(answer: bytes, tokens: Sequence[int]) -> bytes:
    """Return an answer that ends in an empty list with its tokens, made in pieces.

    A million in one call would keep the interpreter from other threads for 90 ms.
    """
    starts = range(0, len(tokens), _PIECE)
    pieces = [to_json(tokens[start : start + _PIECE])[1:-1] for start in starts]
    return b"".join((answer.removesuffix(b"]}"), b",".join(pieces), b"]}"))


async def tokens_of(service: Service, body: TokenizeRequest) -> tuple[int, ...]:
    """Tokenise a text, or messages as the chat route renders them. Raises RequestError."""
    asked = body.add_special_tokens
    if body.messages is None:
        assert body.prompt is not None, "checked by the schema"
        return await service.tokenize(body.prompt, add_special_tokens=asked is not False)
    turn = ChatTurn(
        messages=[message.for_template() for message in body.messages],
        opens_answer=body.opens_answer,
        continue_final_message=bool(body.continue_final_message),
        reasoning_effort=body.reasoning_effort,
        add_special_tokens=bool(asked),
        variables=body.chat_template_kwargs,
        documents=body.documents,
        tools=[tool.tool(index) for index, tool in enumerate(body.tools or ())],
        choice=call_choice(body.tool_choice),
    )
    return await prompt_ids(service, turn, await render(service, turn))


def model_router(service: Service) -> APIRouter:
    """Build a router with the routes over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    def model_of(deployment: Deployment, name: str) -> Model:
        formats, found = service.chat_formats, service.fingerprint
        return Model(
            id=name,
            root=deployment.name,
            created=service.created,
            max_model_len=deployment.max_len,
            meta=ModelMeta(n_ctx=deployment.max_len, n_ctx_train=deployment.native_len),
            fingerprint=None if found is None else found.of_name(deployment),
            arithmetic=None if found is None else found.arithmetic,
            same_bits_in_any_batch=service.has_same_bits,
            ropewalk=ScalingEntry(
                original_max_position_embeddings=deployment.original_len,
                rope_type=deployment.rope_type,
                policy=deployment.policy,
                tiers=[
                    TierEntry(
                        max_len=min(tier.ceiling, deployment.max_len),
                        factor=tier.factor,
                        rope_type=tier.profile.scaling.rope_type,
                        positions=PositionsField.of(tier.profile.positions),
                    )
                    for tier in deployment.own_tiers
                ],
                allowed_rope_types=deployment.rope_types,
                allowed_positions=deployment.position_methods or None,
                max_rope_factor=deployment.max_rope_factor,
                aliases=service.aliases_of(deployment.name) or None,
                kv_cache_dtype=service.settings.kv_cache_dtype,
                tool_format=None if formats.tools is None else formats.tools.name,
                reasoning=None if formats.reasoning is None else formats.reasoning.open,
            ),
            kv_cache=CacheEntry(
                tokens=service.engine.config.capacity, bytes=dict(service.cache_bytes)
            ),
        )

    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models")
    async def models() -> ModelList:
        names = (*service.deployments, *service.aliases)
        return ModelList(data=[model_of(service.deployment(each), each) for each in names])

    @router.get("/v1/models/{name:path}")  # a hub id has a slash
    async def model(
        name: Annotated[str, Path(description="A served name, or one of its aliases.")],
    ) -> Model:
        return model_of(service.deployment(name), name)

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest) -> Response:
        deployment = service.deployment(body.model)
        tokens = await tokens_of(service, body)
        answer = TokenizeResponse(count=len(tokens), max_model_len=deployment.max_len, tokens=[])
        return await _in_json(_with_tokens, json_bytes(answer), tokens)

    @router.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest) -> Response:
        service.deployment(body.model)
        if len(body.tokens) > service.longest_text:
            told = f"`tokens` must have at most {service.longest_text} entries"
            raise RequestError(f"{told}. Given: {len(body.tokens)}", param="tokens")
        skips = bool(body.skip_special_tokens)
        text = await service.text_of(body.tokens, "tokens", skip_special_tokens=skips)
        return await _in_json(json_bytes, DetokenizeResponse.model_construct(prompt=text))

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        special = service.tokenizer.special_tokens
        return TokenizerInfo(
            tokenizer_class=service.tokenizer.class_name,
            vocab_size=service.vocab_size,
            bos_token=special.get("bos_token"),
            eos_token=special.get("eos_token"),
            pad_token=special.get("pad_token"),
            unk_token=special.get("unk_token"),
            chat_template=service.chat_template.text,
        )

    return router
