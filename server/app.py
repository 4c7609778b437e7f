"""The FastAPI application, made by a function that receives what it serves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from server import errors
from server.api.chat import chat_router
from server.api.completions import completions_router
from server.api.health import health_router
from server.api.models import model_router
from server.api.service import ClientDisconnectedError, Service
from server.middleware.auth import OPEN_PATHS, ApiKeysMiddleware, RequestIdMiddleware
from server.middleware.body_limits import BodyLimits, BodyLimitsMiddleware
from server.middleware.http_metrics import HttpMetricsMiddleware
from server.openapi import describe

_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is there to read it but the log


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """Who may ask, and with how large a request."""

    api_keys: Sequence[str] = ()
    open_metrics: bool = False
    allowed_origins: Sequence[str] = ()
    body: BodyLimits = field(default_factory=BodyLimits)


def create_app(service: Service, gate: AccessPolicy | None = None) -> FastAPI:
    """An application over a service whose engine the caller starts and stops."""
    gate = gate or AccessPolicy()
    app = FastAPI(title="ropewalk")
    errors.install(app, service.metrics.rejected)

    @app.exception_handler(ClientDisconnectedError)
    async def closed(_: Request, __: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(model_router(service))
    app.include_router(health_router(service))
    # The last one added is asked first.
    app.add_middleware(BodyLimitsMiddleware, limits=gate.body)
    if gate.api_keys:
        open_paths = OPEN_PATHS | {"/metrics"} if gate.open_metrics else OPEN_PATHS
        app.add_middleware(ApiKeysMiddleware, keys=gate.api_keys, open_paths=open_paths)
    if gate.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(gate.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(HttpMetricsMiddleware, metrics=service.http_metrics)
    describe(app)
    return app
