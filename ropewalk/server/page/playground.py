"""The routes of the playground: its files, a hidden value in a long prompt, tiers, and /stats."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import Field

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.errors import RequestError
from ropewalk.server.api.completion_schema import DEFAULT_MAX_TOKENS
from ropewalk.server.api.rope_schema import INT64, RopeAnswer, RopeField
from ropewalk.server.api.service import Service
from ropewalk.server.api.strict_body import Body
from ropewalk.server.middleware.json_body import JsonBodyRoute
from ropewalk.server.page.needle import SHORTEST, NeedleAnswer, NeedleMaker
from ropewalk.server.page.page_files import HEADERS, PageFile, page_files
from ropewalk.server.page.stats import Stats, read_stats
from ropewalk.server.turns.models import TokenizeRequest, tokens_of
from ropewalk.server.wording import did_you_mean

# POST /playground/tier: the tokens and the table of a request, before it is sent.
#
# The table is chosen by the code that places requests, so it is that of the answer.


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
            rope=RopeAnswer.of(tier_choice, tier_choice.tier, 0, count),
            problem=None,
        )

    return router


_PARAMETERS = ("context_len", "depth", "seed", "model")  # of /playground/needle
_MAX_NAME = 64  # characters of an unknown parameter in the error message


def stats_router(service: Service) -> APIRouter:
    """Build a router with /stats over one service."""
    router = APIRouter()

    @router.get("/stats")
    def stats() -> Stats:  # not async: it runs off the event loop
        return read_stats(service.metrics)

    return router


def playground_router(service: Service) -> APIRouter:
    """Build a router with the page over one service."""
    router = APIRouter()

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    def root() -> RedirectResponse:
        # Relative, because a proxy may serve this under a prefix.
        return RedirectResponse("playground/", 307)

    for path, file in page_files().items():
        router.add_api_route(
            path, _answering(file), methods=["GET", "HEAD"], include_in_schema=False
        )

    @router.get("/playground/needle", dependencies=[Depends(_no_unknown_parameter)])
    def needle(
        # Its maximum is the deployment's, so NeedleMaker checks both and names them.
        context_len: Annotated[
            int | None,
            Query(
                json_schema_extra={"minimum": SHORTEST},
                description="Tokens of the prompt and of the room for the answer. Default: the "
                "longest context.",
                examples=[512],
            ),
        ] = None,
        depth: Annotated[
            float,
            Query(
                ge=0,
                le=1,
                allow_inf_nan=False,
                description="Share of the text before the value.",
                examples=[0.1],
            ),
        ] = 0.1,
        seed: Annotated[
            int, Query(ge=0, lt=2**63, description="Chooses text and value.", examples=[0])
        ] = 0,
        model: Annotated[
            str | None,
            Query(
                max_length=256,
                description="A served name. Default: the first deployment.",
                examples=["ropewalk-demo"],
            ),
        ] = None,
    ) -> NeedleAnswer:  # not async: it tokenises a long text
        longest = service.deployment(model).max_len
        return NeedleMaker(service.tokenizer, longest).make(
            longest if context_len is None else context_len, depth, seed
        )

    router.include_router(tier_router(service))
    return router


def _no_unknown_parameter(request: Request) -> None:
    """Refuse a parameter that would have no effect. Raises RequestError."""
    for name in request.query_params:
        if name not in _PARAMETERS:
            hint = did_you_mean(name, _PARAMETERS)
            told = name[:_MAX_NAME]
            raise RequestError(
                f"`{told}` is not a parameter of this route, remove it.{hint}", param=told
            )


def _answering(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        headers = {**HEADERS, "ETag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return answer
