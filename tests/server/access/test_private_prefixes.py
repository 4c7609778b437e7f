"""Cached prefixes belong to the name of an API key: no other name can find out what was asked."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.servers.processes import Server, running_server

_PAGE = 64
_firsts = count(100)  # each test has a prompt of its own


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two keys of alice, one of carol, and two without a name."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("alice:a1\nalice:a2\ncarol:c\nplain1\nplain2\n")
    return path


@pytest.fixture(scope="module")
def private(key_file: Path) -> Iterator[Server]:
    """A server as it is by default."""
    with running_server("--api-key-file", str(key_file)) as running:
        yield running


def num_cached(server: Server, key: str, prompt: list[int], **body: object) -> int:
    """The cached tokens that the usage of a request tells."""
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": prompt, "max_tokens": 1, **body},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )
    usage = answer.raise_for_status().json()["usage"]
    cached: int = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return cached


def new_prompt() -> list[int]:
    """A prompt of two pages and a half that no other request has."""
    return [next(_firsts)] * (2 * _PAGE + 20)


def test_another_name_finds_nothing_and_the_same_name_everything(private: Server) -> None:
    """Two keys of one name share, because one replaces the other while clients use both."""
    prompt = new_prompt()
    assert num_cached(private, "a1", prompt) == 0
    assert num_cached(private, "c", prompt) == 0
    assert num_cached(private, "plain1", prompt) == 0
    assert num_cached(private, "a2", prompt) == 2 * _PAGE
    assert num_cached(private, "plain2", prompt) == 2 * _PAGE


@pytest.mark.parametrize("salt", ["alice:", "alice:secret", "secret"])
def test_no_salt_of_a_client_gives_the_prefixes_of_another_name(private: Server, salt: str) -> None:
    """The victim has no salt, or one that the attacker knows."""
    for own in ({}, {"cache_salt": "secret"}):
        prompt = new_prompt()
        num_cached(private, "a1", prompt, **own)
        assert num_cached(private, "c", prompt, cache_salt=salt) == 0


@pytest.mark.long
def test_a_setting_shares_prefixes_among_all_names(key_file: Path) -> None:
    """Then a common prefix is computed once. Salts still keep requests apart."""
    flags = ("--api-key-file", str(key_file), "--share-prefixes")
    with running_server(*flags) as shared:
        prompt = new_prompt()
        assert num_cached(shared, "a1", prompt) == 0
        assert num_cached(shared, "c", prompt) == 2 * _PAGE
        assert num_cached(shared, "c", prompt, cache_salt="alice:") == 0
