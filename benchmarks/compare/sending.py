"""The requests of the client: prompts that no cache holds, and answers that are checked."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from ropewalk.studies.bench.load import Failure, Timing, measure
from ropewalk.studies.bench.target import Prompt, Target

# Lower ids are left out, because they usually belong to a model's special tokens.
FIRST_ID = 16
# A server may send several tokens in one event, because a token was no whole character or the
# client was busy. If events are fewer than this share of the tokens, they do not show when the
# tokens came.
_LEAST_EVENTS = 0.5
# Two random prompts may begin with the same few tokens. If a larger share of a prompt was cached,
# the server had seen the prompt before.
_MOST_CACHED = 0.05


class ScenarioError(Exception):
    """A request failed, or its answer is not as requested; the message names the fault."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Random token ids from one seed, `FIRST_ID` to `vocab_size` - 1."""

    drawn: random.Random
    vocab_size: int

    def ids(self, num_tokens: int) -> list[int]:
        """Draw the next token ids, which are new except by chance."""
        return self.drawn.choices(range(FIRST_ID, self.vocab_size), k=num_tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as token ids, the number of tokens to generate, and whether a cache may hold it."""

    prompt: Sequence[int]
    num_output: int
    may_be_cached: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The times of one answer, in seconds since its request was sent."""

    num_output: int  # tokens
    num_events: int
    sent_s: float  # on the clock of time.perf_counter
    time_to_first_token_s: float
    last_token_s: float
    end_to_end_s: float
    inter_token_s: tuple[float, ...]  # between the events that carried tokens

    @property
    def decode_tokens_per_s(self) -> float:
        """Return the rate from the first token to the last, without the first."""
        return (self.num_output - 1) / (self.last_token_s - self.time_to_first_token_s)


class Sender:
    """A sender to one server that accepts only answers of the requested length."""

    def __init__(self, client: httpx.AsyncClient, target: Target, timeout_s: float) -> None:
        self._client = client
        self._target = target
        self._timeout_s = timeout_s

    def body(self, request: Request) -> bytes:
        """Encode a request as JSON, before any clock starts."""
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
        """Send one request, and read its answer to the end. Raises ScenarioError."""
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
            inter_token_s=timing.inter_token_s,
        )


def check(request: Request, timing: Timing) -> None:
    """Check that the server did exactly the requested work. Raises ScenarioError."""
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
