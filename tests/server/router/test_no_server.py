"""`ropewalk route` without a server that is ready."""

import httpx
import pytest

from tests.server.router.test_route import until
from tests.servers.processes import running_server


def test_without_a_server_looks_fail_at_once_and_generation_waits() -> None:
    """Each 503 has the reason. The wait is longer than the client's patience."""
    dead = "http://127.0.0.1:9"
    with running_server(dead, "--wait-seconds", "3600", subcommand="route") as router:
        until(lambda: "cannot connect" in httpx.get(f"{router.url}/ready").text)
        for path in ("/ready", "/stats", "/v1/models", "/playground/", "/nothing"):
            told = httpx.get(f"{router.url}{path}", timeout=20)
            assert told.status_code == 503
            assert told.headers["retry-after"] == "1"
            message = told.json()["error"]["message"]
            assert message.startswith(f"No server is ready ({dead}: cannot connect: ")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{router.url}/v1/completions", json={}, timeout=0.5)
