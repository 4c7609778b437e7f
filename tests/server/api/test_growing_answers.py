"""Answers that grow over the ends of tiers: max_tokens only bounds them.

Prompts are of library code, of 1 to 1,000 tokens; the embedded model was trained for 256.
"""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.api.asking import tokens_of
from tests.servers.processes import Server

GROWING = ("by_position", "grow", "grow-exact")
MAX_LEN = 2048
NUM_COMPARED = 16
# Some answers begin within the trained length, some beyond it, and some cross the end of a tier.
LENGTHS = (1, 250, 256, 257, 505, 1000)


@pytest.fixture(scope="module")
def prompts(server: Server) -> list[list[int]]:
    """A prompt of each length, none the beginning of another."""
    bos, *ids = tokens_of(server, Path(os.__file__).read_text())
    return [[bos, *ids[37 * at : 37 * at + length - 1]] for at, length in enumerate(LENGTHS)]


def streamed(server: Server, num_events: int, **body: Any) -> list[dict[str, Any]]:
    """The choices of the first events of a greedy stream, which is then left."""
    sent = {"temperature": 0, "ignore_eos": True, "logprobs": 1, "stream": True, **body}
    choices: list[dict[str, Any]] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=sent, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices += json.loads(line.removeprefix("data: "))["choices"]
            if len(choices) == num_events:
                break
    return choices


@pytest.mark.parametrize("policy", GROWING)
def test_first_tokens_do_not_depend_on_max_tokens(
    server: Server, prompts: list[list[int]], policy: str
) -> None:
    """The tokens and the bits of their logprobs are those of a request for just these tokens."""
    rope = {"policy": policy}
    for prompt in prompts:
        most = MAX_LEN - len(prompt) + 1
        short, long = (
            streamed(
                server, NUM_COMPARED, prompt=prompt, max_tokens=max_tokens, rope=rope,
                cache_salt=f"{policy} {max_tokens}",
            )
            for max_tokens in (NUM_COMPARED, most)
        )  # fmt: skip
        assert len(short) == len(long) == NUM_COMPARED
        for one, other in zip(short, long, strict=True):
            assert one["logprobs"] == other["logprobs"], len(prompt)
            assert one["rope"] == other["rope"]
        refused = httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": prompt, "max_tokens": most + 1, "rope": rope},
        )
        assert refused.json()["error"]["code"] == "context_length_exceeded"
