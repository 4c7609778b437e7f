"""Answers beyond the trained length on a table that is not made for it say so."""

from typing import Any

import pytest

from tests.doubles.waiting import wait_until
from tests.server.api.asking import asked, streamed
from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server

TRAINED = 256
NATIVE = {"rope_type": "default"}
WORDS = "a " * 400


def rope_of(server: Server, **fields: Any) -> Any:
    """Return the rope object of a completion."""
    answer = asked(server, "completions", temperature=0, ignore_eos=True, **fields)
    return answer["choices"][0]["rope"]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "rope", "is_beyond"),
    [
        (TRAINED - 3, 4, NATIVE, False),  # the last token takes no position
        (TRAINED - 3, 5, NATIVE, True),
        (TRAINED + 1, 1, NATIVE, True),
        (TRAINED + 1, 5, {"rope_type": "yarn"}, False),
        (TRAINED + 1, 5, None, False),
        (10, 5, None, False),
    ],
)
def test_an_answer_says_if_its_table_is_not_made_for_its_length(
    server: Server, num_prompt: int, max_tokens: int, rope: Any, *, is_beyond: bool
) -> None:
    """The field is true or absent, and a client may send it back."""
    body = {"prompt": [5] * num_prompt, "max_tokens": max_tokens}
    told = rope_of(server, **body, rope=rope)
    assert told.get("beyond_trained_length", False) is is_beyond
    assert rope_of(server, **body, rope=told).get("beyond_trained_length", False) is is_beyond


def test_the_last_event_says_it_if_the_answer_crosses_the_length(server: Server) -> None:
    """If the prompt is beyond already, then every event says it."""
    for num_prompt, first in ((TRAINED - 3, None), (TRAINED + 5, True)):
        body = {"prompt": [5] * num_prompt, "max_tokens": 12, "rope": NATIVE, "ignore_eos": True}
        events = streamed(server, "completions", **body)
        told = [each["choices"][0]["rope"].get("beyond_trained_length") for each in events]
        assert (told[0], told[-1]) == (first, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}),
        ("responses", {"input": WORDS, "max_output_tokens": 2}),
        ("messages", {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}),
    ],
)
def test_every_route_says_it(server: Server, path: str, body: dict[str, Any]) -> None:
    """The object is in the choice, or beside the parts of the answer."""
    answer = asked(server, path, **body, rope=NATIVE)
    told = answer["choices"][0]["rope"] if "choices" in answer else answer["rope"]
    assert told["beyond_trained_length"] is True


def test_the_log_and_a_counter_have_it(server: Server) -> None:
    """A request within the length changes neither."""

    def count() -> float:
        return total(samples_of(server), "ropewalk_requests_beyond_trained_length_total")

    def line(num_prompt: int) -> str:
        """Return the log line of a request with so many tokens."""
        first = len(server.log)
        rope_of(server, prompt=[7] * num_prompt, max_tokens=1, rope=NATIVE)

        def lines() -> list[str]:
            return [each for each in server.log[first:] if f"prompt_tokens={num_prompt}" in each]

        wait_until(lambda: bool(lines()))
        return lines()[0]

    before = count()
    assert "beyond_trained_length" not in line(TRAINED - 33)
    assert count() == before
    assert "beyond_trained_length=true" in line(TRAINED + 33)
    assert count() == before + 1
