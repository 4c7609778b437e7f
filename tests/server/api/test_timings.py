"""`timings_per_token`: the times of an answer under llama.cpp's names."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.servers.processes import Server

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "import os, sys, json"},
    "chat/completions": {"messages": [{"role": "user", "content": "import os, sys, json"}]},
}
BOTH = pytest.mark.parametrize("route", list(BODIES))


def text_of(server: Server, route: str, **fields: Any) -> str:
    """Return the text of an answer to a prompt that no other request has asked."""
    body = {**BODIES[route], "max_tokens": 9, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.text


@BOTH
def test_the_times_of_an_answer_lie_within_it(server: Server, route: str) -> None:
    """The counts are those of the usage, and each rate is a count over its time."""
    began = time.monotonic()
    answer = json.loads(text_of(server, route, timings_per_token=True))
    taken_ms = (time.monotonic() - began) * 1000
    told, usage = answer["timings"], answer["usage"]
    assert told["prompt_n"] + told["cache_n"] == usage["prompt_tokens"]
    assert told["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert told["predicted_n"] == usage["completion_tokens"] == 9
    assert 0 < told["prompt_ms"] + told["predicted_ms"] <= taken_ms
    for part, num in (("prompt", told["prompt_n"]), ("predicted", 8)):
        per_token = told[f"{part}_per_token_ms"]
        assert per_token == pytest.approx(told[f"{part}_ms"] / num, abs=2e-3)
        assert told[f"{part}_per_second"] == pytest.approx(1000 / per_token, rel=0.05)
    assert "timings" not in json.loads(text_of(server, route))


@BOTH
def test_every_event_of_a_stream_has_the_times_so_far(server: Server, route: str) -> None:
    """Tokens and times grow, and the prompt's stay as they are."""
    text = text_of(server, route, timings_per_token=True, stream=True)
    events = [json.loads(each[6:]) for each in text.splitlines() if each.startswith("data: {")]
    told = [each["timings"] for each in events]
    assert told[-1]["predicted_n"] == 9
    assert [each["predicted_n"] for each in told] == sorted({each["predicted_n"] for each in told})
    times = [each["predicted_ms"] for each in told]
    assert times == sorted(times)
    assert times[-1] > times[0] == 0
    assert len({(each["prompt_ms"], each["prompt_n"]) for each in told}) == 1
    assert "timings" not in text_of(server, route, stream=True)


def test_a_cached_prompt_is_not_counted_as_computed(server: Server) -> None:
    """The second request finds whole pages of the first."""
    prompt = [*range(300, 500)]
    first, second = (
        json.loads(text_of(server, "completions", prompt=prompt, timings_per_token=True))["timings"]
        for _ in range(2)
    )
    assert (first["cache_n"], first["prompt_n"]) == (0, 200)
    assert second["cache_n"] > 0
    assert second["cache_n"] + second["prompt_n"] == 200


@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 2}, {"prompt": ["a", "b"]}])
def test_times_of_several_answers_are_refused(server: Server, fields: dict[str, Any]) -> None:
    """The object is of one answer, as in llama.cpp."""
    body = {**BODIES["completions"], "timings_per_token": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "timings_per_token")
    assert "needs one prompt and one answer" in error["message"]
