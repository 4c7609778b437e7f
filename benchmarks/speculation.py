"""`python -m benchmarks.speculation OFF ON`: what drafts gain, two servers in turns.

OFF is the address of `ropewalk serve --max-draft-tokens 0`, ON that of the same server without that
flag. `edit` continues a copy of a file of Python's library. `quote` asks for sections of a text of
about 4,000 tokens, word for word. Each text must be the same on both servers, or the run ends with
code 1. Servers whose drafts may change a text are measured with `--texts-may-differ`.
"""

import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import click
import httpx

_TIMEOUT_S = 600.0
_MODULES = ("bisect", "colorsys", "shlex", "textwrap", "queue", "heapq")
_FILE_CHARACTERS, _COPIED_CHARACTERS = 1400, 350
_TEXT_CHARACTERS = 15_000
_SECTIONS = ("assert", "break", "del", "global", "pass")


def edits() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the bodies of `edit`: a file, and the beginning of the same file."""
    for name in _MODULES:
        source = inspect.getsource(import_module(name))[:_FILE_CHARACTERS]
        head = source[:_COPIED_CHARACTERS]
        prompt = f"{source}\n\n\n# The same file with another name:\n{head}"
        yield "/v1/completions", {"prompt": prompt, "max_tokens": 160}


def quotes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the bodies of `quote`: sections of Python's reference, one of which is asked for."""
    asked = [str(topics[name]) for name in _SECTIONS]
    others = (str(text) for name, text in sorted(topics.items()) if name not in _SECTIONS)
    text = "\n\n".join(asked)
    for other in others:
        if len(text) + len(other) < _TEXT_CHARACTERS:
            text = f"{other}\n\n{text}"
    for section in asked:
        first_line = section.lstrip().splitlines()[0]
        question = f"Copy the section that begins with {first_line!r} word for word."
        content = f"{text}\n\n{question}"
        yield (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": content}], "max_tokens": 160},
        )


SCENARIOS: dict[str, Callable[[], Iterator[tuple[str, dict[str, Any]]]]] = {
    "edit": edits,
    "quote": quotes,
}


def streamed(client: httpx.Client, url: str, path: str, body: dict[str, Any]) -> tuple[str, float]:
    """Return the text of an answer, and its tokens a second from the first token to the last."""
    asked = {**body, "temperature": 0, "stream": True, "ignore_eos": True}
    asked["stream_options"] = {"include_usage": True}
    pieces, times, num_tokens = [], [], 0
    with client.stream("POST", f"{url}{path}", json=asked) as response:
        if response.status_code != httpx.codes.OK:
            raise click.ClickException(f"{url}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                times.append(time.perf_counter())
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(pieces), (num_tokens - 1) / (times[-1] - times[0])


def measured(
    urls: Sequence[str], scenario: str, num_rounds: int
) -> tuple[list[list[float]], list[bool]]:
    """Return the tokens a second of every request by server, and which texts were equal."""
    rates: list[list[float]] = [[] for _ in urls]
    are_equal = []
    with httpx.Client(timeout=_TIMEOUT_S) as client:
        for number in range(num_rounds + 1):  # the first one reads prompts into the prefix cache
            for path, body in SCENARIOS[scenario]():
                texts = set()
                order = range(len(urls)) if number % 2 else reversed(range(len(urls)))
                for server in order:
                    text, rate = streamed(client, urls[server], path, body)
                    texts.add(text)
                    if number:
                        rates[server].append(rate)
                are_equal.append(len(texts) == 1)
    return rates, are_equal


@click.command()
@click.argument("off")
@click.argument("on")
@click.option("--scenario", type=click.Choice(list(SCENARIOS)), default="edit", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--texts-may-differ", is_flag=True, help="Count equal texts, and require none.")
def main(off: str, on: str, scenario: str, rounds: int, *, texts_may_differ: bool) -> None:
    """Print the tokens a second without and with drafts, and their ratio by request."""
    (without, drafted), are_equal = measured((off, on), scenario, rounds)
    if not texts_may_differ and not all(are_equal):
        num_differ = are_equal.count(False)
        raise click.ClickException(f"{scenario}: {num_differ} of {len(are_equal)} texts differ")
    ratios = sorted(after / before for before, after in zip(without, drafted, strict=True))
    click.echo(
        f"{scenario}: {median(without):.1f} -> {median(drafted):.1f} tokens/s, ratio "
        f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), {len(ratios)} answers; "
        f"{sum(are_equal)} of {len(are_equal)} texts are equal"
    )


if __name__ == "__main__":
    main()
