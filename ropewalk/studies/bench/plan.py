"""The plan of `ropewalk bench`: lengths, counts and the order of the requests."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ropewalk.server.wording import first_key
from ropewalk.studies.harness.options import COUNT, FILE, MANY, Listed, option
from ropewalk.studies.harness.plotting import INSTALL_MATPLOTLIB

_SHORTEST = 64  # tokens; below it, only the fixed cost of a request is visible


class BenchError(Exception):
    """A load that cannot be sent, or a result that cannot be written; the message is a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of the command line; lengths are in tokens."""

    url: str
    model: str | None = option(
        "Model name to send. Default: the first that the server lists.", metavar="NAME"
    )
    context_lens: tuple[int, ...] = option(
        "Prompt lengths in tokens. Default: powers of two from 64 to what max_model_len leaves "
        "beside the output.",
        Listed(COUNT),
        (),
    )
    output_tokens: int = option("Tokens to generate per request.", COUNT, 16, metavar="N")
    num_requests: int = option("Measured requests per context length.", COUNT, 8)
    concurrency: int = option("Requests in flight, all of the same context length.", COUNT, 1)
    num_warmup: int = option(
        "Requests per context length that are sent first and not measured.", MANY, 1
    )
    seed: int = option("Seed of the prompts.", int, 0)
    timeout_s: float = option(
        "Seconds that one request may take.",
        click.FloatRange(min=0, min_open=True),
        600,
        flag="--timeout-seconds",
        metavar="SECONDS",
    )
    api_key: str | None = option(
        "API key, sent as a bearer token. Default: none.  [ROPEWALK_API_KEY]",
        metavar="KEY",
        envvar="ROPEWALK_API_KEY",
        callback=first_key,
    )
    rope: str | None = option("The `rope` object of every request. Default: none.", metavar="JSON")
    json_path: str | None = option(
        "File for every number, in JSON. For - the numbers go to standard output, and the table "
        "goes to standard error.",
        flag="--json",
        metavar="FILE",
    )
    plot_path: Path | None = option(  # noqa: RUF009  # a field
        f"File for a plot of the latency, .png or .svg. Needs matplotlib: {INSTALL_MATPLOTLIB}.",
        FILE,
        flag="--plot",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The settings of one run. Lengths are in tokens, counts are per context length."""

    context_lens: tuple[int, ...]
    output_tokens: int
    num_requests: int
    concurrency: int  # in-flight requests, all of the same context length
    num_warmup: int
    seed: int
    timeout_s: float  # for one request, from sending to the end of its answer
    rope: dict[str, Any] | None

    def groups(self) -> Iterator["Group"]:
        """Yield groups in the order of sending, the warm-up first.

        A round has one group of each length, so a machine that slows down affects all lengths.
        """
        warmup = _cut(self.num_warmup, self.concurrency)
        rounds = [*warmup, *_cut(self.num_requests, self.concurrency)]
        sent = 0
        for number, size in enumerate(rounds):
            for context_len in self.context_lens:
                yield Group(number, number < len(warmup), context_len, range(sent, sent + size))
            sent += size

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds, including the warm-up."""
        cuts = (_cut(self.num_warmup, self.concurrency), _cut(self.num_requests, self.concurrency))
        return sum(len(each) for each in cuts)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests sent at the same time; the next group waits until all are finished."""

    round: int  # from 0
    is_warmup: bool
    context_len: int
    numbers: range  # of the requests among those of this length, from 0


def _cut(count: int, size: int) -> list[int]:
    """Split `count` into parts of `size`; the last one is smaller if there is a remainder."""
    return [min(size, count - start) for start in range(0, count, size)]


def parse_rope(text: str | None) -> dict[str, Any] | None:
    """Parse the JSON object of --rope; the server checks its fields. Raises BenchError."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchError(f"--rope is not JSON: {error}; got {text!r}") from error
    if not isinstance(found, dict):
        raise BenchError(f"--rope must be a JSON object, got {text!r}")
    return found


def choose_context_lens(
    asked: tuple[int, ...], max_model_len: int | None, output_tokens: int
) -> tuple[int, ...]:
    """Return the requested lengths, or powers of two up to the longest that fits.

    Raises BenchError if the requested lengths do not fit.
    """
    if not asked:
        return _default_context_lens(max_model_len, output_tokens)
    # The last token is never read back, so it needs no position.
    if max_model_len is not None and asked[-1] + output_tokens - 1 > max_model_len:
        raise BenchError(
            f"--context-lens must be <= {max_model_len - output_tokens + 1} tokens (max_model_len "
            f"{max_model_len} - {output_tokens} output tokens + 1), got {asked[-1]}"
        )
    return asked


def _default_context_lens(max_model_len: int | None, output_tokens: int) -> tuple[int, ...]:
    if max_model_len is None:
        raise BenchError("the server does not report its max_model_len: give --context-lens")
    top = max_model_len - output_tokens
    if top < 1:
        raise BenchError(
            f"--output-tokens must be < {max_model_len} (the model's max_model_len), got "
            f"{output_tokens}"
        )
    powers = []
    length = _SHORTEST
    while length < 0.75 * top:  # closer to the longest, it would nearly repeat that point
        powers.append(length)
        length *= 2
    return (*powers, top)
