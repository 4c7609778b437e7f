"""The router's key: who may send requests, and who reads what without an API key."""

import asyncio
from typing import Any

import httpx
import pytest

from ropewalk.server.access.allowance import KeyMetrics
from ropewalk.server.access.assigned_ids import ANSWER_HEADER, KEY_HEADER, new_ids
from ropewalk.server.access.key_ring import KeyRing
from ropewalk.server.access.keys import UNNAMED, ApiKey, KeyTable, digest_of
from ropewalk.server.metrics import MetricFactory
from ropewalk.server.middleware.auth import OPEN_PATHS, ApiKeysMiddleware, RouterMiddleware

KEY = "a-key-of-the-router"
OWN = {KEY_HEADER: KEY}  # of the router's own requests
PASSED_ON = {**OWN, ANSWER_HEADER: new_ids(1).header()}  # of a client


async def _ok(_: Any, __: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def status(path: str, headers: dict[str, str], *, only: bool, with_keys: bool = False) -> int:
    """The status that a server answers with."""
    app: Any = _ok
    if with_keys:
        keys = KeyTable((ApiKey(UNNAMED, digest_of("sk")),), {})
        app = ApiKeysMiddleware(app, KeyRing(keys, KeyMetrics(MetricFactory())), OPEN_PATHS)
    transport = httpx.ASGITransport(app=RouterMiddleware(app, KEY, only=only))

    async def asked() -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return (await client.get(path, headers=headers)).status_code

    return asyncio.run(asked())


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/docs"])
def test_with_router_only_a_request_needs_the_key(path: str) -> None:
    assert status(path, {}, only=True) == 403
    assert status(path, {KEY_HEADER: "another-key-than-it"}, only=True) == 403
    assert status(path, PASSED_ON, only=True) == 200
    assert status(path, {}, only=False) == 200


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_need_none(path: str) -> None:
    assert status(path, {}, only=True) == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics"])
def test_a_client_behind_the_router_needs_its_api_key(path: str) -> None:
    """The router reads both for itself; a request that it passes on has an identity."""
    assert status(path, OWN, only=True, with_keys=True) == 200
    assert status(path, PASSED_ON, only=True, with_keys=True) == 401
    with_key = {**PASSED_ON, "authorization": "Bearer sk"}
    assert status(path, with_key, only=True, with_keys=True) == 200
