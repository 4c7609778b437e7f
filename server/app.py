"""The FastAPI application, built over a given service."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse
from starlette.routing import Route

from server import errors
from server.access.access_log import CLIENT_CLOSED_REQUEST, AccessLog, Logged, Routes
from server.access.key_ring import KeyRing
from server.access.open_request import SpanSource
from server.access.opener import RequestOpener
from server.access.refusals import ClientDisconnectedError
from server.api.chat import chat_router
from server.api.completions import completions_router
from server.api.health import health_router
from server.api.messages.error_format import AnthropicErrorsMiddleware
from server.api.messages.route import messages_router
from server.api.models import model_router
from server.api.responses.route import responses_router
from server.api.service import Service
from server.middleware.auth import OPEN_PATHS, ApiKeysMiddleware, RequestIdMiddleware
from server.middleware.body_limits import BodyLimits, BodyLimitsMiddleware
from server.middleware.head_checks import HeadChecksMiddleware, HeadRules
from server.middleware.http_metrics import HttpMetricsMiddleware
from server.openapi import describe
from server.page.page_files import page_files
from server.playground.routes import playground_router, stats_router
from server.reference.page import HEADERS, address_of, render
from server.version import own_version

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
    open_metrics: bool = False
    has_playground: bool = False
    access_log: Logged | None = None  # the requests that have a line; None: no request
    spans: SpanSource | None = None  # None: no traces
    allowed_origins: Sequence[str] = ()
    head: HeadRules = field(default_factory=HeadRules)
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
    app.add_middleware(HeadChecksMiddleware, rules=gate.head)
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
