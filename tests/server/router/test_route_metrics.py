"""The metrics of a router and of its servers, and the end of a router under load."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.doubles.waiting import wait_until
from tests.server.router.other_server import other_server
from tests.server.router.restarted import restarted
from tests.server.router.test_route import FLAGS, ROUTER, Reader, metric, routed
from tests.servers.processes import running_server, without_replicas

pytestmark = without_replicas

_ASKED = {"prompt": "import os", "max_tokens": 3, "min_tokens": 3}
_TURNS = (*ROUTER, "--routing", "round_robin")


def ask(url: str, num: int) -> None:
    for _ in range(num):
        assert httpx.post(f"{url}/v1/completions", json=_ASKED, timeout=60).status_code == 200


def targets(url: str, **headers: str) -> list[tuple[str, str]]:
    """The name and the page of each server, read as Prometheus reads its targets."""
    found = httpx.get(f"{url}/metrics/servers", headers=headers).json()
    pages = []
    for each in found:
        (host,), labels = each["targets"], each["labels"]
        parameters = {"server": labels["__param_server"]}
        page = httpx.get(f"http://{host}/metrics", params=parameters, headers=headers)
        pages.append((labels["instance"], page.text if page.is_success else ""))
    return pages


def test_the_metrics_of_each_server_are_read_through_the_router() -> None:
    """The sum of the servers' numbers is in /stats; a server that is lost has no page."""
    with (
        running_server(*FLAGS) as one,
        restarted(1, *FLAGS) as (other,),
        routed(one.url, other.url, flags=_TURNS, num_ready=2) as url,
    ):
        ask(url, 4)
        wait_until(lambda: httpx.get(f"{url}/stats").json()["generated_tokens"] == 12)
        pages = dict(targets(url))
        assert set(pages) == {each.url.removeprefix("http://") for each in (one, other)}
        for page in pages.values():
            assert "ropewalk_generated_tokens_total 6.0" in page
        own = httpx.get(f"{url}/metrics").text
        assert 'ropewalk_router_requests_total{status="200"}' in own
        assert "ropewalk_generated_tokens_total" not in own
        other.end()
        wait_until(lambda: metric(url, 'servers{state="ready"}') == 1)
        assert [name for name, page in targets(url) if page] == [one.url.removeprefix("http://")]
        assert httpx.get(f"{url}/metrics?server=http://127.0.0.1:1").status_code == 404


def test_metrics_of_servers_need_the_keys_that_the_servers_ask_for() -> None:
    """The router could read them by its own key, which a client has not."""
    with (
        running_server(*FLAGS, "--api-key", "of-a-client") as server,
        routed(server.url, num_ready=1) as url,
    ):
        assert httpx.get(f"{url}/metrics").status_code == 200
        assert "ropewalk_generated" in targets(url, authorization="Bearer of-a-client")[0][1]
        for headers in ({}, {"authorization": "Bearer of-another"}):
            of_one = (f"/metrics?server={each}" for each in (server.url, "http://127.0.0.1:1"))
            for path in ("/metrics/servers", *of_one, "/stats"):
                assert httpx.get(f"{url}{path}", headers=headers).status_code == 401


def test_streams_end_with_an_error_event_when_the_time_of_a_shutdown_is_over() -> None:
    """The client has what came before. A request without an answer gets 503."""
    first = b'data: {"text": "a"}\n\n'
    flags = (*ROUTER, "--shutdown-timeout-seconds", "0.5")
    with other_server() as other:
        other.parts, other.is_held = [first] * 6, True
        with running_server(other.url, *flags, subcommand="route") as router:
            wait_until(lambda: metric(router.url, 'servers{state="ready"}') == 1)
            paths = ("/v1/completions", "/v1/messages", "/v1/responses")
            try:
                readers = [Reader(router.url, each, {"stream": True}) for each in paths]
                for each in readers:
                    assert each.has_begun.wait(60)
                other.status = 400
                with ThreadPoolExecutor(1) as pool:
                    url = f"{router.url}/v1/completions"
                    whole = pool.submit(httpx.post, url, json={}, timeout=60)
                    wait_until(lambda: other.num_asked == 4)
                    os.kill(router.pid, signal.SIGTERM)
                    told = whole.result()
            finally:
                other.is_held = False
            assert (told.status_code, told.json()["error"]["code"]) == (503, "draining")
            for reader in readers:
                reader.join(60)
                assert reader.data.startswith(first * 6)
            completion, message, response = (each.data[len(first) * 6 :] for each in readers)
            assert b'"code": "draining"' in completion
            assert completion.endswith(b"data: [DONE]\n\n")
            assert b'"type": "api_error"' in message
            assert b'"code": "draining"' in response
            assert b'"sequence_number": 6' in response


@pytest.mark.parametrize("status", [200, 400])
def test_a_shutdown_waits_for_answers_that_end_in_time(status: int) -> None:
    first = b'data: {"text": "a"}\n\n'
    with other_server() as other:
        other.parts, other.is_held, other.status = [first], True, status
        with running_server(other.url, "--check-seconds", "0.1", subcommand="route") as router:
            wait_until(lambda: metric(router.url, 'servers{state="ready"}') == 1)
            with ThreadPoolExecutor(1) as pool:
                try:
                    url = f"{router.url}/v1/completions"
                    answer = pool.submit(httpx.post, url, json={"stream": True}, timeout=60)
                    wait_until(lambda: other.num_asked == 1)
                    os.kill(router.pid, signal.SIGTERM)
                    wait_until(lambda: httpx.post(url, json={}).status_code == 503)
                    assert not answer.done()
                finally:
                    other.is_held = False
                told = answer.result()
            assert told.status_code == status
            assert b"draining" not in told.content
