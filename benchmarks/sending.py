"""Requests of the yardstick: prompts that no cache knows, and answers that are counted."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from server.bench.load import Failure, Timing, measure
from server.bench.target import Prompt, Target

# Ids below are left out: a model's own special tokens usually have the first ones.
FIRST_ID = 16
# A server may send several tokens in one event, because one token was no whole character or because
# its client was busy. Fewer events than this share of the tokens would no longer tell when tokens
# came.
_LEAST_EVENTS = 0.5
# Random prompts may begin with the same few tokens; a larger share of a prompt was seen before.
_MOST_CACHED = 0.05


class ScenarioError(Exception):
    """A request was refused, or its answer is not what was asked for; names request and fault."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random token ids from one seed, `FIRST_ID` to `vocab_size` - 1."""

    drawn: random.Random
    vocab_size: int

    def ids(self, num_tokens: int) -> list[int]:
        """The next ones; never the same twice but by chance."""
        return self.drawn.choices(range(FIRST_ID, self.vocab_size), k=num_tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, how many tokens to generate, and whether a cache may know it."""

    prompt: Sequence[int]
    num_output: int
    may_be_cached: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """When the tokens of one request came; seconds since it was sent."""

    num_output: int  # tokens
    num_events: int
    sent_s: float  # on the clock of time.perf_counter
    time_to_first_token_s: float
    last_token_s: float
    end_to_end_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        """From the first token to the last, without the first."""
        return (self.num_output - 1) / (self.last_token_s - self.time_to_first_token_s)


class Sender:
    """Sends to one server, and takes no answer that is not of the length asked for."""

    def __init__(self, client: httpx.AsyncClient, target: Target, timeout_s: float) -> None:
        self._client = client
        self._target = target
        self._timeout_s = timeout_s

    def body(self, request: Request) -> bytes:
        """As JSON. Made before any clock starts."""
        return json.dumps(
            {
                "model": self._target.model,
                "prompt": list(request.prompt),
                "max_tokens": request.num_output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def send(self, request: Request, body: bytes) -> Answer:
        """One request to its end. Raises ScenarioError."""
        prompt = Prompt(list(request.prompt), len(request.prompt))
        sent_s = time.perf_counter()
        timing = await measure(self._client, self._target, body, prompt, self._timeout_s)
        if isinstance(timing, Failure):
            raise ScenarioError(f"{timing.kind}: {timing.message}")
        check(request, timing)
        return Answer(
            num_output=timing.completion_tokens,
            num_events=len(timing.token_times_s),
            sent_s=sent_s,
            time_to_first_token_s=timing.time_to_first_token_s,
            last_token_s=timing.token_times_s[-1],
            end_to_end_s=timing.end_to_end_s,
        )


def check(request: Request, timing: Timing) -> None:
    """The server did all of the work and no other. Raises ScenarioError."""
    asked, told, events = request.num_output, timing.completion_tokens, len(timing.token_times_s)
    if told != asked:
        raise ScenarioError(f"{asked} tokens were asked for, the server counts {told}")
    if not _LEAST_EVENTS * asked <= events <= asked:
        raise ScenarioError(f"{asked} tokens were asked for, {events} events brought them")
    if timing.prompt_tokens != len(request.prompt):
        raise ScenarioError(
            f"the prompt has {len(request.prompt)} tokens, the server read {timing.prompt_tokens}"
        )
    cached = timing.cached_tokens or 0
    if not request.may_be_cached and cached > _MOST_CACHED * len(request.prompt):
        raise ScenarioError(
            f"{cached} of {len(request.prompt)} prompt tokens came from the server's cache, "
            "though the prompt is new"
        )
