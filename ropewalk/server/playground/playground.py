"""The routes of the playground: its files, a hidden value in a long prompt, tiers, and /stats."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from ropewalk.model_runtime.errors import RequestError
from ropewalk.server.api.service import Service
from ropewalk.server.playground.needle import SHORTEST, NeedleAnswer, NeedleMaker
from ropewalk.server.playground.page_files import HEADERS, PageFile, page_files
from ropewalk.server.playground.stats import Stats, read_stats
from ropewalk.server.playground.tier_route import tier_router
from ropewalk.server.wording import did_you_mean

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
