"""GET /live, /ready, /health, /version and /metrics, for monitoring."""

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from ropewalk.model_runtime.engine.admission import problem_of
from ropewalk.server.api.service import Service
from ropewalk.server.api.strict_body import Body
from ropewalk.server.envelope import envelope
from ropewalk.server.middleware.availability import DRAINING, DRAINING_HEADERS
from ropewalk.server.version import own_commit, own_version

STALL_S = 120.0  # longest step before the engine counts as not well


class StatusAnswer(Body):
    """The answer of a probe that is well."""

    status: Literal["ok"]
    """Always `ok`: others are errors."""


class VersionAnswer(Body):
    """The answer of /version."""

    version: str = Field(examples=["0.2.0"])
    """The release of ropewalk."""
    commit: str | None = Field(examples=["4f2a90c1d3b7"])
    """The commit, or null if nothing tells it (docs/guide/upgrading.md)."""


def health_router(service: Service) -> APIRouter:
    """Build a router with the routes over one service."""
    router = APIRouter()

    def problem() -> str | None:
        return problem_of(service.engine, STALL_S)

    @router.head("/live", include_in_schema=False)
    @router.get("/live", response_model=StatusAnswer)
    async def live() -> JSONResponse:
        return _status(problem())

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=StatusAnswer)
    async def ready(http: Request) -> JSONResponse:
        return _draining(http) or _status(problem())

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=StatusAnswer)
    async def health(http: Request) -> JSONResponse:
        return _draining(http) or _status(problem())

    @router.get("/version")
    def get_version() -> VersionAnswer:  # not async: the first one may ask git
        return VersionAnswer(version=own_version(), commit=own_commit())

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:  # not async: rendering runs off the event loop
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def _draining(http: Request) -> JSONResponse | None:
    if not getattr(http.state, "is_draining", False):
        return None
    return JSONResponse(DRAINING, 503, DRAINING_HEADERS)


def _status(problem: str | None) -> JSONResponse:
    if problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse(envelope(problem, "server_error"), 503)
