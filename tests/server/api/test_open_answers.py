"""Chat answers without max_tokens: their room, and what they say when it is full."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.api.asking import asked, refused, streamed
from tests.servers.processes import Server, running_server


def chat(
    server: Server, num_words: int = 0, rope: dict[str, Any] | None = None, **body: Any
) -> Any:
    """The answer to a prompt of some words, which no end token ends."""
    messages = [{"role": "user", "content": "import" + " os" * num_words}]
    sent = {"messages": messages, "temperature": 0, "ignore_eos": True, "rope": rope, **body}
    return asked(server, "chat/completions", **sent)


# The one table of a request that names it; its answers are short.
NATIVE_ONLY = {"policy": "fixed", "factor": 1}


@pytest.mark.parametrize(
    ("rope", "factor"),
    [(None, 8), ({"policy": "grow"}, 8), ({"policy": "fixed", "factor": 2}, 2), (NATIVE_ONLY, 1)],
)
def test_a_full_tier_is_told(server: Server, rope: dict[str, Any] | None, factor: float) -> None:
    """The finish reason is length, as under max_tokens, so the `rope` object tells them apart."""
    choice = chat(server, rope=rope)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["rope"]["ended_by"] == "tier"
    assert choice["rope"]["factor"] == factor


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 3},
        {"max_completion_tokens": 200},
        {"stop": ["o", "e", " "]},
        {"logit_bias": {"1": 100}, "ignore_eos": False},
    ],
)
def test_other_ends_are_not_a_full_tier(server: Server, body: dict[str, Any]) -> None:
    """The field is absent, so that clients which know no such field see none."""
    assert "ended_by" not in chat(server, **body)["choices"][0]["rope"]


def test_the_last_event_of_a_stream_tells_it(server: Server) -> None:
    """No earlier event has the field."""
    body = {"messages": [{"role": "user", "content": "import"}], "ignore_eos": True}
    events = streamed(server, "chat/completions", **body, temperature=0, rope=NATIVE_ONLY)
    *others, last = (event["choices"][0] for event in events)
    assert not any("ended_by" in each["rope"] for each in others)
    assert (last["rope"]["ended_by"], last["finish_reason"]) == ("tier", "length")


@pytest.mark.parametrize("policy", ["by_position", "grow"])
def test_an_answer_without_max_tokens_begins_as_a_short_one(server: Server, policy: str) -> None:
    """A prompt of 223 tokens has room for 1,826 more, and its first table is the trained one."""
    num_tokens = chat(server, max_tokens=1)["usage"]["prompt_tokens"]
    fields: dict[str, Any] = {"num_words": 223 - num_tokens, "rope": {"policy": policy}}
    found = chat(server, **fields)
    assert found["usage"]["prompt_tokens"] == 223
    assert found["usage"]["completion_tokens"] == 1826
    rope = found["choices"][0]["rope"]
    assert (rope["factor"], rope["rescaled"]) == (8, 3)
    short = chat(server, **fields, max_tokens=34)["choices"][0]
    assert (short["rope"]["factor"], short["rope"]["rescaled"]) == (1, 0)
    assert found["choices"][0]["message"]["content"].startswith(short["message"]["content"])


@pytest.mark.parametrize("policy", ["by_position", "grow", "grow-exact"])
def test_events_tell_the_tier_so_far(server: Server, policy: str) -> None:
    """With the eighth token the seventh has a position, the 257th.

    The prompt has 250 tokens, and the newest token has no position yet.
    """
    body: dict[str, Any] = {
        "prompt": [7] * 250, "max_tokens": 20, "ignore_eos": True, "logprobs": 1,
        "rope": {"policy": policy},
    }  # fmt: skip
    ropes = [event["choices"][0]["rope"] for event in streamed(server, "completions", **body)]
    assert [each["factor"] for each in ropes] == [1] * 7 + [2] * 13
    assert [each["rope_type"] for each in ropes] == ["default"] * 7 + ["yarn"] * 13
    assert [each["rescaled"] for each in ropes] == [0] * 7 + [1] * 13
    assert {each["policy"] for each in ropes} == {policy}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """A server whose context ends within a tier, and whose operator narrowed the methods."""
    flags = ["--max-model-len", "300", "--allowed-rope-types", "yarn"]
    with running_server(*flags) as running:
        yield running


def test_the_end_of_the_context_is_told_apart(narrow: Server) -> None:
    """No factor and no max_tokens would give such an answer more."""
    assert chat(narrow, rope=NATIVE_ONLY)["choices"][0]["rope"]["ended_by"] == "tier"
    for num_words in (0, 250):
        choice = chat(narrow, num_words=num_words)["choices"][0]
        assert (choice["rope"]["ended_by"], choice["rope"]["factor"]) == ("max_model_len", 2)


def test_the_rope_of_a_short_answer_can_be_sent_back(narrow: Server) -> None:
    """The operator allows yarn only, and short answers report default."""
    reported = chat(narrow, max_tokens=2)["choices"][0]["rope"]
    rope = {name: reported[name] for name in ("rope_type", "factor", "policy")}
    assert rope["rope_type"] == "default"
    assert chat(narrow, max_tokens=2, rope=rope)["choices"][0]["rope"] == {
        **reported,
        "requested_factor": 1.0,
    }
    body = {"prompt": [5] * 250, "max_tokens": 8, "rope": {"rope_type": "default"}}
    error = refused(narrow, "completions", **body)
    assert error["param"] == "rope.rope_type"
    assert "within the native length (256 tokens) only" in error["message"]
