"""The FastAPI application, made by a function that receives what it serves."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from server import errors
from server.chat import chat_router
from server.completions import completions_router
from server.health import health_router
from server.http_metrics import HttpMetricsMiddleware
from server.model_list import model_router
from server.service import ClientDisconnectedError, Service

_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is there to read it but the log


def create_app(
    service: Service,
    on_ready: Callable[[], None] = lambda: None,
    on_death: Callable[[], None] = lambda: None,
) -> FastAPI:
    """An application that starts the service's engine with itself and stops it at its end.

    `on_death` is called, on the engine's thread, should the engine end by itself.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start(on_death)
        on_ready()
        yield
        service.engine.stop()

    app = FastAPI(title="ropewalk", lifespan=lifespan)
    errors.install(app, service.metrics.rejected)
    app.add_middleware(HttpMetricsMiddleware, metrics=service.http_metrics)

    @app.exception_handler(ClientDisconnectedError)
    async def closed(_: Request, __: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(model_router(service))
    app.include_router(health_router(service))
    return app
