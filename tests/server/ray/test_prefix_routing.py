"""The share of cached prefix tokens on two replicas."""

import random
from collections.abc import Iterator

import httpx
import pytest

from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server, running_server
from tests.servers.progress import say

pytestmark = pytest.mark.ray

NUM_PREFIXES, NUM_REQUESTS, PAGE, NUM_PAGES = 12, 10, 16, 4
# A cache for seven prefixes, with a page for the rest of one request.
CACHE_TOKENS = (7 * NUM_PAGES + 2) * PAGE


@pytest.fixture
def routed() -> Iterator[Server]:
    """A server with two replicas and small caches."""
    flags = (
        *("--replicas", "2", "--threads", "1", "--page-size", str(PAGE)),
        *("--kv-cache-tokens", str(CACHE_TOKENS), "--max-model-len", str(CACHE_TOKENS // 2)),
    )
    with running_server(*flags) as running:
        yield running


def test_cached_share_of_twelve_prefixes(routed: Server) -> None:
    """At least 0.95 of the best possible share is cached."""
    generator = random.Random(5)
    prefixes = [
        [generator.randrange(300, 1000) for _ in range(NUM_PAGES * PAGE)]
        for _ in range(NUM_PREFIXES)
    ]
    order = [index for index in range(NUM_PREFIXES) for _ in range(NUM_REQUESTS)]
    generator.shuffle(order)
    num_cached = 0
    with httpx.Client(base_url=routed.url, timeout=60) as client:
        for number, index in enumerate(order):
            prompt = [*prefixes[index], 300 + number]
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            answer.raise_for_status()
            num_cached += answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    share = num_cached / (len(order) * NUM_PAGES * PAGE)
    best = 1 - 1 / NUM_REQUESTS
    say(f"{share:.3f} of prefix tokens cached, {share / best:.3f} of the best")
    assert total(samples_of(routed), "ropewalk_prompt_tokens_cached_total") == num_cached
    assert share >= 0.95 * best
