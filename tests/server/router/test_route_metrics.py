"""The metrics of a fleet at its router, and the end of a router under load."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.router.other_server import other_server
from tests.server.router.restarted import restarted
from tests.server.router.test_route import FLAGS, ROUTER, Reader, metric, routed, until
from tests.servers.processes import running_server, without_replicas

pytestmark = without_replicas

_ASKED = {"prompt": "import os", "max_tokens": 3, "min_tokens": 3}
_TURNS = (*ROUTER, "--routing", "round_robin")


def value(url: str, series: str) -> float:
    """The sum of the samples whose names begin so."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))


def ask(url: str, num: int) -> None:
    for _ in range(num):
        assert httpx.post(f"{url}/v1/completions", json=_ASKED, timeout=60).status_code == 200


@pytest.mark.costly
def test_counts_of_the_fleet_survive_a_killed_server() -> None:
    """They are those of both servers, before and after one begins anew from zero."""
    tokens, prompts = "ropewalk_generated_tokens_total", "ropewalk_prompt_tokens_total"
    firsts = "ropewalk_time_to_first_token_seconds_count{"
    with restarted(2, *FLAGS) as servers:
        one, other = servers
        with routed(one.url, other.url, flags=_TURNS, num_ready=2) as url:
            ask(url, 6)
            until(lambda: value(url, tokens) == 18)
            assert value(one.url, tokens) + value(other.url, tokens) == 18
            assert value(other.url, tokens) > 0
            assert value(url, firsts) == 6
            assert value(url, prompts) == value(one.url, prompts) + value(other.url, prompts)
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            for each in servers:
                assert f'ropewalk_kv_cache_tokens{{server="{each.url}"}} 16384.0' in lines
            other.end()
            until(lambda: metric(url, 'servers{state="ready"}') == 1)
            assert value(url, tokens) == 18
            page = httpx.get(f"{url}/metrics").text
            assert f'ropewalk_kv_cache_tokens{{server="{other.url}"}}' not in page
            other.start()
            until(lambda: metric(url, 'servers{state="ready"}') == 2)
            assert value(url, tokens) == 18
            ask(url, 4)
            until(lambda: value(url, tokens) == 30)
            assert value(url, firsts) == 10
            assert value(other.url, tokens) < 12, "it began at zero"


def test_metrics_of_the_fleet_need_the_keys_that_the_servers_ask_for() -> None:
    """The router could read them by its own key, which a client has not."""
    with (
        running_server(*FLAGS, "--api-key", "of-a-client") as server,
        routed(server.url, num_ready=1) as url,
    ):
        told = httpx.get(f"{url}/metrics").text
        assert "ropewalk_router_refused_servers" in told
        assert "ropewalk_generated_tokens_total" not in told
        bearer = {"Authorization": "Bearer of-a-client"}
        told = httpx.get(f"{url}/metrics", headers=bearer).text
        assert "ropewalk_generated_tokens_total" in told
        wrong = {"Authorization": "Bearer of-another"}
        assert "ropewalk_generated" not in httpx.get(f"{url}/metrics", headers=wrong).text


@pytest.mark.costly
def test_streams_end_with_an_error_event_when_the_time_of_a_shutdown_is_over() -> None:
    """The client has what came before. A request without an answer gets 503."""
    first = b'data: {"text": "a"}\n\n'
    flags = (*ROUTER, "--shutdown-timeout-seconds", "0.5")
    with other_server() as other:
        other.parts, other.is_held = [first] * 6, True
        with running_server(other.url, *flags, subcommand="route") as router:
            until(lambda: metric(router.url, 'servers{state="ready"}') == 1)
            paths = ("/v1/completions", "/v1/messages", "/v1/responses")
            try:
                readers = [Reader(router.url, each, {"stream": True}) for each in paths]
                for each in readers:
                    assert each.has_begun.wait(60)
                other.status = 400
                with ThreadPoolExecutor(1) as pool:
                    url = f"{router.url}/v1/completions"
                    whole = pool.submit(httpx.post, url, json={}, timeout=60)
                    until(lambda: other.num_asked == 4)
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


@pytest.mark.costly
@pytest.mark.parametrize("status", [200, 400])
def test_a_shutdown_waits_for_answers_that_end_in_time(status: int) -> None:
    first = b'data: {"text": "a"}\n\n'
    with other_server() as other:
        other.parts, other.is_held, other.status = [first], True, status
        with running_server(other.url, "--check-seconds", "0.1", subcommand="route") as router:
            until(lambda: metric(router.url, 'servers{state="ready"}') == 1)
            with ThreadPoolExecutor(1) as pool:
                try:
                    url = f"{router.url}/v1/completions"
                    answer = pool.submit(httpx.post, url, json={"stream": True}, timeout=60)
                    until(lambda: other.num_asked == 1)
                    os.kill(router.pid, signal.SIGTERM)
                    until(lambda: httpx.post(url, json={}).status_code == 503)
                    assert not answer.done()
                finally:
                    other.is_held = False
                told = answer.result()
            assert told.status_code == status
            assert b"draining" not in told.content
