"""`max_time` and max_request_seconds: what has begun ends, and what waits is refused with 408."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.api.tools.scripted import Scripted, saying

# A step takes a thirtieth of the time, so an answer begins in it, and is far from its end.
STEP_S, TIME_S = 0.05, 1.5
MOST = 400
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": MOST},
    "/v1/chat/completions": {**CHAT, "max_tokens": MOST},
    "/v1/responses": {"input": "a", "max_output_tokens": MOST},
    "/v1/messages": {**CHAT, "max_tokens": MOST},
}
PATHS = list(BODIES)


@pytest.fixture(scope="module")
def slow() -> Iterator[Scripted]:
    """A server that computes one answer at a time, a token every twentieth of a second."""
    with saying("x" * 1000, step_seconds=STEP_S, config={"max_num_seqs": 1}) as server:
        yield server
        wait_until_idle(server)


def wait_until_idle(server: Scripted) -> None:
    """Return when no request of an earlier test runs; none may keep pages."""
    core, deadline = server.service.engine._core, time.monotonic() + 10
    while not core.is_idle:
        assert time.monotonic() < deadline
        time.sleep(STEP_S)
    assert core.scheduler.pool.num_used == 0, "an ended request keeps pages"


def behind_another(server: Scripted, path: str, **fields: Any) -> httpx.Response:
    """The answer to a request while another one occupies the engine."""

    async def ask() -> httpx.Response:
        async with server.http() as http:
            running = asyncio.ensure_future(
                http.post("/v1/completions", json=BODIES["/v1/completions"], timeout=60)
            )
            while not server.service.engine._core.scheduler.running:  # noqa: ASYNC110  # a thread's
                await asyncio.sleep(STEP_S / 2)
            try:
                return await http.post(path, json={**BODIES[path], **fields})
            finally:
                running.cancel()

    wait_until_idle(server)
    return asyncio.run(ask())


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream."""
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def text_and_end(path: str, body: Any) -> tuple[str, Any, int]:
    """The text of a whole answer, why it ended, and its number of tokens."""
    usage = body["usage"]
    if path == "/v1/responses":
        text = body["output"][0]["content"][0]["text"]
        return text, body["incomplete_details"]["reason"], usage["output_tokens"]
    if path == "/v1/messages":
        return body["content"][0]["text"], body["stop_reason"], usage["output_tokens"]
    choice = body["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], usage["completion_tokens"]


ENDS = dict(zip(PATHS, ("length", "length", "max_output_tokens", "max_tokens"), strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_has_begun_ends_with_what_it_has(slow: Scripted, path: str) -> None:
    """It ends in its time, as if max_tokens were as many as there are."""
    began = time.monotonic()
    answer = slow.post(path, {**BODIES[path], "max_time": TIME_S})
    seconds = time.monotonic() - began
    assert answer.status_code == 200, answer.text
    text, end, num_tokens = text_and_end(path, answer.json())
    assert (text, end) == ("x" * num_tokens, ENDS[path])
    assert 0 < num_tokens < MOST
    assert seconds >= TIME_S
    assert answer.json().get("choices", [{}])[0].get("rope", {}).get("ended_by") is None


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_waits_is_refused_when_its_time_is_over(slow: Scripted, path: str) -> None:
    """The clients of OpenAI and Anthropic are asked not to repeat it."""
    answer = behind_another(slow, path, max_time=0.2)
    assert answer.status_code == 408, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("request_timeout", "max_time")
    assert error["message"] == "The request had no token within 0.2 seconds (max_time)."
    assert error["type"] == ("timeout_error" if "messages" in path else "invalid_request_error")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_ends_in_its_time(slow: Scripted, path: str) -> None:
    """One that has begun has the same last events as any; one that waits has an error."""
    begun = slow.post(path, {**BODIES[path], "max_time": TIME_S, "stream": True})
    assert "request_timeout" not in begun.text
    assert f'"{ENDS[path]}"' in begun.text
    waiting = events(behind_another(slow, path, max_time=0.2, stream=True))[-1]
    error = waiting.get("error") or waiting["response"]["error"]
    assert error["message"] == "The request had no token within 0.2 seconds (max_time)."
    if path != "/v1/messages":
        assert error["code"] == "request_timeout"


def test_choices_that_have_not_begun_end_with_the_others(slow: Scripted) -> None:
    """Two of three answers wait for the first; a candidate without a token is never the best."""
    asked = {**BODIES["/v1/completions"], "max_time": TIME_S, "n": 3}
    body = slow.post("/v1/completions", asked).json()
    assert [each["finish_reason"] for each in body["choices"]] == ["length"] * 3
    lengths = [len(each["text"]) for each in body["choices"]]
    assert lengths[0] == body["usage"]["completion_tokens"] > 0
    assert lengths[1:] == [0, 0]
    best = slow.post("/v1/completions", {**asked, "n": 1, "best_of": 3}).json()["choices"]
    assert best[0]["text"]


def test_text_that_may_begin_a_stop_string_is_not_lost(slow: Scripted) -> None:
    """It is held back while the answer grows."""
    asked = {**BODIES["/v1/completions"], "max_time": TIME_S, "stop": ["x" * 200 + "y"]}
    body = slow.post("/v1/completions", asked).json()
    assert len(body["choices"][0]["text"]) == body["usage"]["completion_tokens"] > 0


def test_the_operators_bound_is_the_default_and_the_most() -> None:
    """A request may name less, and not more."""
    path = "/v1/chat/completions"
    with saying("x" * 1000, step_seconds=STEP_S, max_request_seconds=TIME_S) as server:
        whole = server.post(path, BODIES[path]).json()
        assert whole["choices"][0]["finish_reason"] == "length"
        assert 0 < whole["usage"]["completion_tokens"] < MOST
        refused = server.post(path, {**BODIES[path], "max_time": 2}).json()["error"]
        assert refused["message"] == "`max_time` must be at most 1.5 seconds. Given: 2.0"
        assert server.post(path, {**BODIES[path], "max_time": 0}).json()["error"]["param"] == (
            "max_time"
        )
    with saying("x", step_seconds=STEP_S, max_request_seconds=1e-6) as server:
        error = server.post(path, BODIES[path]).json()["error"]
        assert (error["code"], error["param"]) == ("request_timeout", None)
        assert error["message"].endswith("(max_request_seconds).")
