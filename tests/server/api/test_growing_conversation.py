"""A conversation that grows over several tiers finds the pages of its earlier turns.

It has ten turns, from half of the trained length to four times it.
"""

import json.encoder
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server, running_server, without_replicas

pytestmark = without_replicas  # each replica has pages of its own

L = 256
NUM_TURNS = 10
FILE = """
page_size: 16
deployments:
  - name: demo
  - name: static
    rope_scaling: {rope_type: yarn, factor: 8.0}
    rope_policy: fixed
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model under the default policy, and under one table."""
    path = tmp_path_factory.mktemp("config") / "ropewalk.yaml"
    path.write_text(FILE)
    with running_server("--config", str(path)) as running:
        yield running


def num_under_other_tables(server: Server) -> float:
    """The prompt tokens so far that the cache had under other tables only."""
    return total(samples_of(server), "ropewalk_prompt_tokens_under_other_tables_total")


def converse(server: Server, model: str, salt: str) -> int:
    """The prompt tokens of all turns that were found in the cache.

    A turn's prompt is the one before it, its answer, and what the user says then.
    """
    text = Path(json.encoder.__file__).read_text()
    source = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=60)
    source_ids = source.json()["tokens"]
    num_cached, prompt = 0, list[int]()
    for turn in range(NUM_TURNS):
        length = L // 2 + turn * (4 * L - L // 2) // (NUM_TURNS - 1)
        prompt += source_ids[len(prompt) : length]
        body = {
            "model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "cache_salt": salt,
        }  # fmt: skip
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        prompt += answer["choices"][0]["token_ids"]
    assert len(prompt) == 4 * L + 12
    return num_cached


def test_the_default_finds_the_pages_that_one_table_finds(two: Server) -> None:
    """Tables of further positions leave the pages of earlier ones as they are."""
    before = num_under_other_tables(two)
    num_found = converse(two, "demo", "own tables")
    assert num_under_other_tables(two) == before, "every page was found under its own tables"
    num_static = converse(two, "static", "one table")
    assert num_static > NUM_TURNS * L
    assert num_found >= 0.95 * num_static


@pytest.mark.parametrize(
    "rope", [{"policy": "grow"}, {"rope_type": "linear"}, {"policy": "fixed", "factor": 8}]
)
def test_prompts_that_the_cache_has_under_other_tables_are_counted(
    two: Server, rope: dict[str, Any]
) -> None:
    """Mixed policies and methods divide the cache, which the metric tells."""
    salt = json.dumps(rope)
    prompt = [at % 199 + 9 for at in range(900)]
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "cache_salt": salt}

    def ask(**more: Any) -> tuple[int, float]:
        before = num_under_other_tables(two)
        answer = httpx.post(f"{two.url}/v1/completions", json={**body, **more}, timeout=60).json()
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, num_under_other_tables(two) - before

    assert ask() == (0, 0)
    assert ask() == (896, 0)
    cached, num_missed = ask(rope=rope)
    assert num_missed > 0
    assert cached + num_missed == 896
    assert ask(rope=rope) == (896, 0)
    assert ask(cache_salt=f"another {salt}") == (0, 0), "another salt is another text"
