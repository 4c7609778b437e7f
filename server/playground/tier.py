"""POST /playground/tier: the tokens and the table of a request, before it is sent.

The table is chosen by the code that places requests, so it is that of the answer.
"""

from fastapi import APIRouter
from pydantic import Field

from model_runtime.deployment import RopeRequest
from model_runtime.errors import RequestError
from server.api.completion_schema import DEFAULT_MAX_TOKENS
from server.api.fields.rope_schema import INT64, RopeAnswer, RopeField
from server.api.json_body import JsonBodyRoute
from server.api.model_schema import TokenizeRequest
from server.api.models import tokens_of
from server.api.service import Service
from server.api.strict_body import Body


class TierRequest(TokenizeRequest):
    """A prompt or messages, with the fields that choose the table."""

    max_tokens: int | None = Field(None, ge=1, le=INT64)
    rope: RopeField | None = None


class TierAnswer(Body):
    """The `rope` object that the answer will begin with, or the reason why there is none."""

    count: int  # tokens of the prompt
    max_model_len: int
    tier_len: int | None  # tokens up to which the table serves
    rope: RopeAnswer | None
    problem: str | None


def tier_router(service: Service) -> APIRouter:
    """Build a router with the route over one service."""
    router = APIRouter(route_class=JsonBodyRoute)

    @router.post("/playground/tier")
    async def tier(body: TierRequest) -> TierAnswer:
        deployment = service.deployment(body.model)
        count = len(await tokens_of(service, body))
        asked = RopeRequest() if body.rope is None else body.rope.request()
        max_tokens = body.max_tokens
        if max_tokens is None and body.messages is None:
            max_tokens = DEFAULT_MAX_TOKENS
        try:
            if max_tokens is None:
                placement = deployment.place_open(asked, count)[1]
            else:
                placement = deployment.place(asked, count, max_tokens)
        except RequestError as error:
            return TierAnswer(
                count=count,
                max_model_len=deployment.max_len,
                tier_len=None,
                rope=None,
                problem=str(error),
            )
        return TierAnswer(
            count=count,
            max_model_len=deployment.max_len,
            tier_len=min(placement.tier.ceiling, deployment.max_len),
            rope=RopeAnswer.of(placement, placement.tier, 0, count),
            problem=None,
        )

    return router
