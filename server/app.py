"""The FastAPI application, built over a given service."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from server import errors
from server.api.chat import chat_router
from server.api.completions import completions_router
from server.api.generation_response import ClientDisconnectedError
from server.api.health import health_router
from server.api.messages.error_format import AnthropicErrorsMiddleware
from server.api.messages.route import messages_router
from server.api.models import model_router
from server.api.responses.route import responses_router
from server.api.service import Service
from server.middleware.auth import OPEN_PATHS, ApiKeysMiddleware, RequestIdMiddleware
from server.middleware.body_limits import BodyLimits, BodyLimitsMiddleware
from server.middleware.http_metrics import HttpMetricsMiddleware
from server.openapi import describe

_CLIENT_CLOSED_REQUEST = 499  # nginx's number; only the log shows it


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """API keys, origins and limits that every request has to meet."""

    api_keys: Sequence[str] = ()
    open_metrics: bool = False
    allowed_origins: Sequence[str] = ()
    body: BodyLimits = field(default_factory=BodyLimits)


def create_app(service: Service, gate: AccessPolicy | None = None) -> FastAPI:
    """Build an application over a service; the caller starts and stops its engine."""
    gate = gate or AccessPolicy()
    app = FastAPI(title="ropewalk")
    errors.install(app, service.metrics.rejected)

    @app.exception_handler(ClientDisconnectedError)
    async def closed(_: Request, __: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(responses_router(service))
    app.include_router(messages_router(service))
    app.include_router(model_router(service))
    app.include_router(health_router(service))
    # The middleware added last runs first.
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
    app.add_middleware(AnthropicErrorsMiddleware)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(HttpMetricsMiddleware, metrics=service.http_metrics)
    describe(app)
    return app
