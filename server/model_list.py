"""GET /v1/models and POST /tokenize: what is served, and how it reads a text."""

from fastapi import APIRouter

from server.schema import Model, ModelList, TokenizeRequest, TokenizeResponse
from server.service import Service


def model_router(service: Service) -> APIRouter:
    """Both routes, over one service."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(
            data=[
                Model(
                    id=deployment.name,
                    created=service.created,
                    max_model_len=min(deployment.max_len, service.max_len),
                )
                for deployment in service.deployments.values()
            ]
        )

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        deployment = service.deployment(body.model)
        tokens = await service.tokenize(body.prompt, add_special_tokens=body.add_special_tokens)
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=min(deployment.max_len, service.max_len),
            tokens=tokens,
        )

    return router
