"""`ropewalk route` without a server that is ready."""

import httpx
import pytest

from tests.doubles.waiting import wait_until
from tests.server.router.other_server import other_server
from tests.servers.processes import running_server


def test_without_a_server_looks_fail_at_once_and_generation_waits() -> None:
    """Each 503 has the reason, and no address. The wait is longer than the client's patience."""
    dead = "http://127.0.0.1:9"
    with running_server(dead, "--wait-seconds", "3600", subcommand="route") as router:
        wait_until(lambda: "cannot connect" in httpx.get(f"{router.url}/ready").text)
        for path in ("/ready", "/stats", "/v1/models", "/playground/", "/nothing"):
            told = httpx.get(f"{router.url}{path}", timeout=20)
            assert told.status_code == 503
            assert told.headers["retry-after"] == "1"
            assert told.json()["error"]["message"] == "No server is ready (cannot connect)."
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{router.url}/v1/completions", json={}, timeout=0.5)


def test_a_look_waits_for_the_first_check_of_a_server() -> None:
    """A router that has just begun to listen does not know yet that its server is ready."""
    with other_server() as server:
        server.is_hashing = True
        with running_server(server.url, subcommand="route") as router:
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(f"{router.url}/v1/models", timeout=0.5)
            server.is_hashing = False
            assert httpx.get(f"{router.url}/v1/models", timeout=20).status_code == 200
            server.is_ready = False
            wait_until(lambda: httpx.get(f"{router.url}/ready").status_code == 503)
            assert httpx.get(f"{router.url}/v1/models", timeout=5).status_code == 503
