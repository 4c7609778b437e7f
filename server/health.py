"""GET /health, /ready and /metrics: for those who watch."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.errors import envelope
from server.service import Service


def health_router(service: Service) -> APIRouter:
    """The routes, over one service."""
    router = APIRouter()

    def state() -> JSONResponse:
        if service.engine.is_running:
            return JSONResponse({"status": "ok"})
        return JSONResponse(envelope("The engine is not running.", "server_error"), 503)

    @router.get("/health")
    async def health() -> JSONResponse:
        return state()

    @router.get("/ready")
    async def ready() -> JSONResponse:
        return state()

    @router.get("/metrics")
    def metrics() -> Response:  # not async: rendering runs off the event loop
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
