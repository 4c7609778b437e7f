"""POST /playground/tier: the tokens and the table of a request, before it is sent.

The table is chosen by the code that places requests, so it is that of the answer.
"""

from fastapi import APIRouter
from pydantic import Field

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.errors import RequestError
from ropewalk.server.api.completion_schema import DEFAULT_MAX_TOKENS
from ropewalk.server.api.rope_schema import INT64, RopeAnswer, RopeField
from ropewalk.server.api.service import Service
from ropewalk.server.api.strict_body import Body
from ropewalk.server.middleware.json_body import JsonBodyRoute
from ropewalk.server.turns.models import TokenizeRequest, tokens_of


class TierRequest(TokenizeRequest):
    """A prompt or messages, with the fields that choose the table."""

    max_tokens: int | None = Field(None, ge=1, le=INT64, examples=[100])
    """The most tokens of the answer. Default: as in the routes that generate."""
    rope: RopeField | None = None
    """The scaling of the request. Default: the deployment's."""


class TierAnswer(Body):
    """The `rope` object that the answer will begin with, or the reason why there is none."""

    count: int = Field(examples=[80])
    """Tokens of the prompt."""
    max_model_len: int = Field(examples=[2048])
    """The longest context of the model, in tokens."""
    tier_len: int | None = Field(examples=[256])
    """Tokens up to which the table serves, or null beside a problem."""
    rope: RopeAnswer | None
    """The `rope` object of the answer, or null beside a problem."""
    problem: str | None = Field(examples=[None])
    """The reason why there is no table, or null."""


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
                tier_choice = deployment.choose_open(asked, count)[1]
            else:
                tier_choice = deployment.choose(asked, count, max_tokens)
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
            tier_len=min(tier_choice.tier.ceiling, deployment.max_len),
            rope=RopeAnswer.of(
                tier_choice, tier_choice.tier, 0, count, has_same_bits=service.has_same_bits
            ),
            problem=None,
        )

    return router
