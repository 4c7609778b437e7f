"""Chat answers without max_tokens: their room, and what they say when it is full."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.servers.processes import Server, running_server, without_replicas


def chat(url: str, num_words: int = 0, rope: dict[str, Any] | None = None, **body: Any) -> Any:
    """The answer to a prompt of some words, which no end token ends."""
    messages = [{"role": "user", "content": "import" + " os" * num_words}]
    sent = {"messages": messages, "temperature": 0, "ignore_eos": True, "rope": rope, **body}
    found = httpx.post(f"{url}/v1/chat/completions", json=sent, timeout=60)
    found.raise_for_status()
    return found.json()


# The one table of a request that names it; its answers are short.
NATIVE_ONLY = {"policy": "fixed", "factor": 1}


@pytest.mark.parametrize(
    ("rope", "factor"),
    [(None, 8), ({"policy": "grow"}, 8), ({"policy": "fixed", "factor": 2}, 2), (NATIVE_ONLY, 1)],
)
def test_a_full_tier_is_told(server: Server, rope: dict[str, Any] | None, factor: float) -> None:
    """The finish reason is length, as under max_tokens, so the `rope` object tells them apart."""
    choice = chat(server.url, rope=rope)["choices"][0]
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
    assert "ended_by" not in chat(server.url, **body)["choices"][0]["rope"]


def test_the_last_event_of_a_stream_tells_it(server: Server) -> None:
    """No earlier event has the field."""
    body = {
        "messages": [{"role": "user", "content": "import"}], "temperature": 0, "ignore_eos": True,
        "stream": True, "rope": NATIVE_ONLY,
    }  # fmt: skip
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert ['"ended_by":"tier"' in event for event in events] == [False] * (len(events) - 1) + [
        True
    ]
    assert '"finish_reason":"length"' in events[-1]


@pytest.mark.parametrize("policy", ["by_position", "grow"])
def test_an_answer_without_max_tokens_begins_as_a_short_one(server: Server, policy: str) -> None:
    """A prompt of 223 tokens has room for 1,826 more, and its first table is the trained one."""
    num_tokens = chat(server.url, max_tokens=1)["usage"]["prompt_tokens"]
    asked: dict[str, Any] = {"num_words": 223 - num_tokens, "rope": {"policy": policy}}
    found = chat(server.url, **asked)
    assert found["usage"]["prompt_tokens"] == 223
    assert found["usage"]["completion_tokens"] == 1826
    rope = found["choices"][0]["rope"]
    assert (rope["factor"], rope["rescaled"]) == (8, 3)
    short = chat(server.url, **asked, max_tokens=34)["choices"][0]
    assert (short["rope"]["factor"], short["rope"]["rescaled"]) == (1, 0)
    assert found["choices"][0]["message"]["content"].startswith(short["message"]["content"])


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """A server whose context ends within a tier, and whose operator narrowed the methods."""
    flags = ["--max-model-len", "300", "--allowed-rope-types", "yarn", "--max-n", "4"]
    with running_server(*flags) as running:
        yield running


@without_replicas
def test_the_end_of_the_context_is_told_apart(narrow: Server) -> None:
    """No factor and no max_tokens would give such an answer more."""
    assert chat(narrow.url, rope=NATIVE_ONLY)["choices"][0]["rope"]["ended_by"] == "tier"
    for num_words in (0, 250):
        choice = chat(narrow.url, num_words=num_words)["choices"][0]
        assert (choice["rope"]["ended_by"], choice["rope"]["factor"]) == ("max_model_len", 2)


@without_replicas
def test_the_rope_of_a_short_answer_can_be_sent_back(narrow: Server) -> None:
    """The operator allows yarn only, and short answers report default."""
    reported = chat(narrow.url, max_tokens=2)["choices"][0]["rope"]
    asked = {name: reported[name] for name in ("rope_type", "factor", "policy")}
    assert asked["rope_type"] == "default"
    assert chat(narrow.url, max_tokens=2, rope=asked)["choices"][0]["rope"] == {
        **reported,
        "requested_factor": 1.0,
    }
    body = {"prompt": [5] * 250, "max_tokens": 8, "rope": {"rope_type": "default"}}
    refused = httpx.post(f"{narrow.url}/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "rope.rope_type"
    assert "within the native length (256 tokens) only" in refused.json()["error"]["message"]


@without_replicas
def test_the_banner_tells_who_may_ask_for_what(narrow: Server) -> None:
    """Methods, the largest factor, access and changed limits have lines."""
    for line in (
        "    longest        300 tokens (max_model_len)\n",
        "    requests       may name yarn, default (up to 256 tokens); factors up to 8; any policy",
        "  access           every client that reaches the port, without a key\n",
        "  limits           max_n 4\n",
    ):
        assert line in narrow.banner
