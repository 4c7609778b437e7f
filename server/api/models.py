"""The served models (/v1/models) and their tokenizer (/tokenize and related routes)."""

import asyncio
from functools import partial

from fastapi import APIRouter

from model_runtime.deployment import Deployment
from server.api.json_body import JsonBodyRoute
from server.api.model_schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    Model,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from server.api.service import Service


def model_router(service: Service) -> APIRouter:
    """Build a router with the routes over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    def model_of(deployment: Deployment) -> Model:
        return Model(
            id=deployment.name,
            created=service.created,
            max_model_len=deployment.max_len,
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
        tokens = await service.tokenize(body.prompt, add_special_tokens=body.add_special_tokens)
        return TokenizeResponse(
            count=len(tokens), max_model_len=deployment.max_len, tokens=list(tokens)
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        service.deployment(body.model)
        service.check_token_id(max(body.tokens, default=0), "tokens")
        decode = partial(
            service.tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens
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
