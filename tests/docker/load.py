"""Real load on a running server: short and long contexts, streamed and not, and some refusals."""

import bisect
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.servers.processes import Server

# The embedded model's buckets; it was trained on 256 tokens and is served to 2,048.
BOUNDS = [16, 32, 64, 128, 256, 512, 1024, 2048]
_PROMPT_LENS = (12, 60, 120, 200, 300, 700, 1300, 1900)
_CLIENTS = 3
MODELS = ("dynamic", "static")  # the deployments that get the load


@dataclass
class Measured:
    """The seconds that the clients measured, by context_bucket."""

    first_token_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    whole_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_sent: Counter[tuple[str, str]] = field(default_factory=Counter)  # (model, bucket)
    num_refused: int = 0

    def add(self, other: "Measured") -> None:
        """Add the measurements of another client."""
        for ours, theirs in (
            (self.first_token_s, other.first_token_s),
            (self.whole_s, other.whole_s),
        ):
            for bucket, seconds in theirs.items():
                ours[bucket].extend(seconds)
        self.num_sent += other.num_sent
        self.num_refused += other.num_refused

    def num_requests(self) -> int:
        """The number of answered requests."""
        answered = [*self.first_token_s.values(), *self.whole_s.values()]
        return sum(len(seconds) for seconds in answered)

    def most_s(self, bucket: str) -> float:
        """An upper bound on the times to the first token of the bucket."""
        return max([*self.first_token_s[bucket], *self.whole_s[bucket]])


def _bucket(prompt_len: int) -> str:
    return str(BOUNDS[bisect.bisect_left(BOUNDS, prompt_len)])


def _body(prompt_len: int, number: int) -> dict[str, Any]:
    # Every fourth prompt comes again and again, and finds itself in the prefix cache.
    first = 7 if number % 4 == 0 else 10 + number % 1000
    body: dict[str, Any] = {"prompt": [first] * prompt_len, "max_tokens": 6, "ignore_eos": True}
    if prompt_len == 200 and number % 2:
        body |= {"max_tokens": 80, "rope": {"policy": "grow"}}
    return body


def _streamed(client: httpx.Client, url: str, body: dict[str, Any]) -> float:
    """The seconds to the first token of a streamed request."""
    began = time.monotonic()
    with client.stream("POST", url, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        # Comments come before the first event: the stream is opened at once.
        while not next(lines).startswith("data:"):
            pass
        seconds = time.monotonic() - began
        for _ in lines:
            pass
    return seconds


def send_load(server: Server, seconds: float) -> Measured:
    """Send rounds over all lengths for so long, and at least one of each client."""
    url, together = f"{server.url}/v1/completions", Measured()
    deadline = time.monotonic() + seconds

    def one_client(which: int) -> Measured:
        number, measured = which, Measured()
        with httpx.Client(timeout=60) as client:
            while True:
                for prompt_len in _PROMPT_LENS:
                    body, bucket = _body(prompt_len, number), _bucket(prompt_len)
                    body["model"] = MODELS[which == 0]
                    measured.num_sent[body["model"], bucket] += 1
                    began = time.monotonic()
                    if number % 2:
                        measured.first_token_s[bucket].append(_streamed(client, url, body))
                    else:
                        client.post(url, json=body).raise_for_status()
                        measured.whole_s[bucket].append(time.monotonic() - began)
                    number += _CLIENTS
                refused = client.post(url, json={"prompt": [7] * 5000})
                assert refused.status_code == 400
                measured.num_refused += 1
                if time.monotonic() >= deadline:
                    return measured

    with ThreadPoolExecutor(_CLIENTS) as pool:
        for each in pool.map(one_client, range(_CLIENTS)):
            together.add(each)
    return together
