"""`timings_per_token`: the times of an answer under llama.cpp's names."""

import time
from typing import Any

import pytest

from tests.server.api.asking import asked, streamed
from tests.servers.processes import Server

BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "import os, sys, json"},
    "chat/completions": {"messages": [{"role": "user", "content": "import os, sys, json"}]},
}
BOTH = pytest.mark.parametrize("route", list(BODIES))


def body_of(route: str, **fields: Any) -> dict[str, Any]:
    """Return a body with a prompt that no other request has."""
    return {**BODIES[route], "max_tokens": 9, "temperature": 0, "ignore_eos": True, **fields}


@BOTH
def test_the_times_of_an_answer_lie_within_it(server: Server, route: str) -> None:
    """The counts are those of the usage, and each rate is a count over its time."""
    began = time.monotonic()
    answer = asked(server, route, **body_of(route, timings_per_token=True))
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
    assert "timings" not in asked(server, route, **body_of(route))


@BOTH
def test_every_event_of_a_stream_has_the_times_so_far(server: Server, route: str) -> None:
    """Tokens and times grow, and the prompt's stay as they are."""
    events = streamed(server, route, **body_of(route, timings_per_token=True))
    told = [each["timings"] for each in events]
    assert told[-1]["predicted_n"] == 9
    assert [each["predicted_n"] for each in told] == sorted({each["predicted_n"] for each in told})
    times = [each["predicted_ms"] for each in told]
    assert times == sorted(times)
    assert times[-1] > times[0] == 0
    assert len({(each["prompt_ms"], each["prompt_n"]) for each in told}) == 1
    assert not any("timings" in each for each in streamed(server, route, **body_of(route)))


def test_a_cached_prompt_is_not_counted_as_computed(server: Server) -> None:
    """The second request finds whole pages of the first."""
    body = body_of("completions", prompt=[*range(300, 500)], timings_per_token=True)
    first, second = (asked(server, "completions", **body)["timings"] for _ in range(2))
    assert (first["cache_n"], first["prompt_n"]) == (0, 200)
    assert second["cache_n"] > 0
    assert second["cache_n"] + second["prompt_n"] == 200
