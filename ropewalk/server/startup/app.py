"""The FastAPI application, built over a given service."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import Route

from ropewalk.server import errors
from ropewalk.server.access.access_log import (
    CLIENT_CLOSED_REQUEST,
    AccessLog,
    Logged,
    RequestOpener,
    Routes,
)
from ropewalk.server.access.key_ring import KeyRing
from ropewalk.server.access.open_request import SpanSource
from ropewalk.server.access.refusals import ClientDisconnectedError
from ropewalk.server.api.completions import completions_router
from ropewalk.server.api.health import health_router
from ropewalk.server.api.service import Service
from ropewalk.server.middleware.auth import (
    OPEN_PATHS,
    ApiKeysMiddleware,
    RequestIdMiddleware,
    RouterMiddleware,
)
from ropewalk.server.middleware.body_limits import BodyLimits, BodyLimitsMiddleware
from ropewalk.server.middleware.host_check import AllowedHosts, HostCheckMiddleware
from ropewalk.server.middleware.http_metrics import HttpMetricsMiddleware
from ropewalk.server.playground.docs_page import HEADERS, address_of, render
from ropewalk.server.playground.page_files import page_files
from ropewalk.server.playground.playground import playground_router, stats_router
from ropewalk.server.playground.schema_words import PREFIX, add_examples
from ropewalk.server.turns.chat import chat_router
from ropewalk.server.turns.messages import AnthropicErrorsMiddleware, messages_router
from ropewalk.server.turns.models import model_router
from ropewalk.server.turns.responses import responses_router
from ropewalk.server.version import own_version

_ANSWERS = {
    "400": "A mistake in the request.",
    "401": "No API key, or none that is known.",
    "403": "The Host header is not allowed.",
    "404": "No such model.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "The queue is full, or a bound of the API key is reached; with Retry-After.",
    "500": "A bug of the server.",
    "503": "The model loads, the process ends, or the engine failed; with Retry-After.",
}


class ErrorDetail(BaseModel):
    """An error. Some kinds add numbers to these fields."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    message: str = Field(examples=["`max_tokens` must be at least 0. Given: -1"])
    """What is wrong, with field, limit and value."""
    type: str = Field(examples=["invalid_request_error"])
    """The kind of the error."""
    param: str | None = Field(examples=["max_tokens"])
    """The first field that is wrong, or null."""
    code: str | None = Field(examples=[None])
    """A word for programs (docs/reference/errors.md), or null."""


class ErrorBody(BaseModel):
    """OpenAI's envelope."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    error: ErrorDetail
    """The error."""


def describe(app: FastAPI, open_paths: Collection[str] | None) -> None:
    """Set the application's document, which is built at its first request.

    `open_paths` need no API key; None: no path needs one.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = found["components"]["schemas"]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            envelope = ErrorBody.model_json_schema(ref_template=f"{PREFIX}{{model}}")
            schemas |= {**envelope.pop("$defs"), "ErrorBody": envelope}
            add_examples(schemas)
            for path, methods in found["paths"].items():
                needs_key = open_paths is not None and path not in open_paths
                for operation in methods.values():
                    _tell_errors(operation, path, needs_key)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _tell_errors(operation: dict[str, Any], path: str, needs_key: bool) -> None:  # noqa: FBT001
    """Add the errors that a route can answer to its responses."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own, which this server never sends
    content = {"application/json": {"schema": {"$ref": f"{PREFIX}ErrorBody"}}}
    statuses = sorted(_statuses(operation, path, needs_key))
    responses |= {each: {"description": _ANSWERS[each], "content": content} for each in statuses}


def _statuses(operation: dict[str, Any], path: str, needs_key: bool) -> Iterator[str]:  # noqa: FBT001
    """Yield the statuses of the errors that a route can answer."""
    yield from ("400", "403", "500", "503")
    if needs_key:
        yield "401"
    has_body = "requestBody" in operation
    if has_body or operation.get("parameters"):
        yield "404"
    if has_body:
        yield from ("408", "413", "415")
    if path.endswith("/completions"):  # only an answer waits in the queue
        yield "429"


_ROUTERS = (
    completions_router,
    chat_router,
    responses_router,
    messages_router,
    model_router,
    health_router,
    stats_router,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """API keys, hosts, origins and limits that every request has to meet."""

    key_ring: KeyRing | None = None  # None: no key is asked for
    router_key: str | None = None  # None: no router is trusted
    router_only: bool = False
    open_metrics: bool = False
    has_playground: bool = False
    access_log: Logged | None = None  # the requests that have a line; None: no request
    spans: SpanSource | None = None  # None: no traces
    allowed_origins: Sequence[str] = ()
    hosts: AllowedHosts | None = None  # None: any host
    body: BodyLimits = field(default_factory=BodyLimits)


def create_app(service: Service, gate: AccessPolicy | None = None) -> FastAPI:
    """Build an application over a service; the caller starts and stops its engine."""
    gate = gate or AccessPolicy()
    # FastAPI's own pages load scripts from a public network.
    app = FastAPI(title="ropewalk", version=own_version(), docs_url=None, redoc_url=None)
    errors.install(app, service.metrics.rejected)

    @app.exception_handler(ClientDisconnectedError)
    async def closed(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    routers = [make(service) for make in _ROUTERS]
    open_paths = OPEN_PATHS | {"/metrics", "/stats"} if gate.open_metrics else OPEN_PATHS
    if gate.has_playground:
        routers.append(playground_router(service))
        # The files hold no secret, and a browser sends no key when it opens a page.
        open_paths |= {"/", *page_files()}
    # None: no path needs a key
    open_without_key = None if gate.key_ring is None else open_paths
    for router in routers:
        app.include_router(router)

    @app.get("/docs", include_in_schema=False)
    def docs(asked: Request) -> Response:  # not async: rendering runs off the event loop
        host = asked.headers.get("host", "")
        page = render(
            app.openapi(),
            next(iter(service.deployments)),
            open_without_key,
            address_of(asked.url.scheme, host, asked.scope.get("root_path", "")),
        )
        return HTMLResponse(page, headers=HEADERS)

    # The middleware added last runs first.
    app.add_middleware(BodyLimitsMiddleware, limits=gate.body)
    if gate.key_ring is not None:
        app.add_middleware(ApiKeysMiddleware, ring=gate.key_ring, open_paths=open_paths)
    if gate.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(gate.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    if gate.hosts is not None:
        app.add_middleware(HostCheckMiddleware, hosts=gate.hosts)
    app.add_middleware(RouterMiddleware, key=gate.router_key, only=gate.router_only)
    app.add_middleware(AnthropicErrorsMiddleware)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(
        HttpMetricsMiddleware, metrics=service.http_metrics, opener=_opener(gate, routers)
    )
    describe(app, open_without_key)
    return app


def _opener(gate: AccessPolicy, routers: Sequence[APIRouter]) -> RequestOpener | None:
    """Return what opens requests for keys, log and traces, or None if there are none of them."""
    if gate.key_ring is None and gate.access_log is None and gate.spans is None:
        return None
    methods: dict[str, set[str]] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, Route):
                methods.setdefault(route.path, set()).update(route.methods or ())
    known = Routes.of(methods)
    log = None if gate.access_log is None else AccessLog(gate.access_log, known)
    return RequestOpener(log, gate.spans, known, has_keys=gate.key_ring is not None)
