"""The keys of a body's prompt: equal as far as the texts are, and never across salts or owners."""

import json
from typing import Any

import pytest

from ropewalk.server.replicas.text_chunks import TextChunks
from ropewalk.server.router.body_chunks import chunks_of

LONG = "A text that many requests begin with. " * 20


def keys(owner: bytes = b"", **body: Any) -> tuple[bytes, ...]:
    return chunks_of(json.dumps(body).encode(), owner).keys


def num_common(first: tuple[bytes, ...], second: tuple[bytes, ...]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


def test_prompts_share_the_keys_of_their_common_beginning() -> None:
    """128 characters make a key."""
    first, second = keys(prompt=LONG + "one" * 100), keys(prompt=LONG + "two" * 100)
    assert num_common(first, second) == len(LONG) // 128
    assert len(first) == (len(LONG) + 300) // 128


@pytest.mark.parametrize("name", ["messages", "input"])
def test_a_conversation_shares_the_keys_of_its_earlier_turns(name: str) -> None:
    before = keys(**{name: turns(LONG)})
    after = keys(**{name: turns(LONG, LONG, "more")})
    assert num_common(before, after) == len(before) > 4


def test_tools_and_system_texts_come_first_as_in_templates() -> None:
    """Two requests with one system text share its keys, whatever their messages."""
    first, second = (keys(messages=turns(text * 99), system=LONG) for text in ("one", "two"))
    assert num_common(first, second) >= len(LONG) // 128
    first, second = (keys(messages=turns(text * 99), tools=[LONG]) for text in ("one", "two"))
    assert num_common(first, second) >= len(LONG) // 128


@pytest.mark.parametrize(
    "other", [{"model": "b"}, {"cache_salt": "s"}, {"rope": {"rope_type": "yarn"}}]
)
def test_another_cache_has_other_keys(other: dict[str, Any]) -> None:
    plain = {"prompt": LONG, "model": "a"}
    assert num_common(keys(**plain), keys(**{**plain, **other})) == 0
    assert num_common(keys(**plain), keys(owner=b"Bearer x", **plain)) == 0


def test_tokens_have_pages_of_tokens() -> None:
    ids = list(range(100))
    found = chunks_of(json.dumps({"prompt": ids}).encode(), b"")
    assert (found.num_tokens, len(found.keys)) == (100, 3)
    longer = chunks_of(json.dumps({"prompt": [[*ids[:64], 7, *ids]]}).encode(), b"")
    assert num_common(found.keys, longer.keys) == 2


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": null}', b"[" * 99_999])
def test_a_body_without_a_prompt_has_no_keys(body: bytes) -> None:
    found = chunks_of(body, b"")
    assert (found.num_tokens, found.keys) == (0, ())


@pytest.mark.parametrize("name", [b"messages", b"model", b"tools"])
def test_deep_values_are_no_error(name: bytes) -> None:
    """Python reads some depths that it cannot write."""
    for depth in range(300, 1100, 10):
        deep = b"[" * depth + b"]" * depth
        assert chunks_of(b'{"%s": %s}' % (name, deep), b"").chunk_size == 32


def test_bodies_that_are_dear_to_parse_have_no_keys() -> None:
    """The key of their sender is not checked yet; the length of a long one still counts."""
    many = json.dumps({"prompt": LONG, "stop": [[]] * 70_000}).encode()
    assert chunks_of(many, b"") == TextChunks(0, 32, ())
    long = json.dumps({"prompt": LONG * 3000}).encode()
    found = chunks_of(long, b"")
    assert not found.keys
    assert found.num_tokens == len(long) // 4
