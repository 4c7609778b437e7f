"""The served models (/v1/models) and their tokenizer (/tokenize and related routes)."""

import asyncio
from functools import partial

from fastapi import APIRouter

from model_runtime.deployment import Deployment
from server.api.fields.rope_schema import PositionsField
from server.api.json_body import JsonBodyRoute
from server.api.model_schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    Model,
    ModelList,
    ModelMeta,
    ScalingEntry,
    TierEntry,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from server.api.service import Service
from server.api.tools.chat_turn import ChatTurn, checked_variables, prompt_ids, render
from server.api.tools.tool_schema import call_choice


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
        variables=checked_variables(service, body.chat_template_kwargs),
        tools=[tool.tool() for tool in body.tools or ()],
        choice=call_choice(body.tool_choice),
    )
    return await prompt_ids(service, turn, await render(service, turn))


def model_router(service: Service) -> APIRouter:
    """Build a router with the routes over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    def model_of(deployment: Deployment) -> Model:
        formats = service.chat_formats
        return Model(
            id=deployment.name,
            created=service.created,
            max_model_len=deployment.max_len,
            meta=ModelMeta(n_ctx=deployment.max_len, n_ctx_train=deployment.native_len),
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
                allowed_rope_types=sorted(deployment.tiers),
                allowed_positions=sorted(deployment.positions) or None,
                max_rope_factor=deployment.max_rope_factor,
                aliases=service.aliases_of(deployment.name) or None,
                answer_reserve_tokens=deployment.reserve.num_tokens,
                tool_format=None if formats.tools is None else formats.tools.name,
                reasoning=None if formats.reasoning is None else formats.reasoning.open,
            ),
        )

    @router.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[model_of(each) for each in service.deployments.values()])

    @router.get("/v1/models/{name:path}")  # a hub id has a slash
    async def model(name: str) -> Model:
        return model_of(service.deployment(name))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        deployment = service.deployment(body.model)
        tokens = await tokens_of(service, body)
        return TokenizeResponse(
            count=len(tokens), max_model_len=deployment.max_len, tokens=list(tokens)
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        service.deployment(body.model)
        service.check_token_id(max(body.tokens, default=0), "tokens")
        decode = partial(
            service.tokenizer.decode,
            body.tokens,
            skip_special_tokens=bool(body.skip_special_tokens),
        )
        return DetokenizeResponse(prompt=await asyncio.to_thread(decode))

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
