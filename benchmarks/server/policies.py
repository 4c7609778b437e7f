"""`python -m benchmarks.server.policies URL`: first tokens and cached tokens under each policy.

Two tables. The first one sends prompts within the trained length twice, greedily, with `max_tokens`
16 and with the largest that fits, and compares the first 16 tokens: of the two answers, and of the
second one with the untouched table. The second one sends a conversation that grows from half the
trained length to the longest context, and counts the prompt tokens that were found in the cache.

A policy is a value of `rope.policy`; `default` leaves `rope` out, and `none` asks for the untouched
table.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import httpx

_FIRST = 16  # tokens that are compared
_LONGEST_PROMPT = 512  # tokens, and at most half of the trained length
_ROPE: dict[str, dict[str, str] | None] = {"default": None, "none": {"rope_type": "default"}}


class Server:
    """A running server, and the texts that it is asked about."""

    def __init__(self, url: str, text: str, seed: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=3600)
        served = self._http.get("/v1/models").json()["data"][0]
        self.model, self.longest = served["id"], served["max_model_len"]
        self.native_len = served["meta"]["n_ctx_train"]
        self.text_ids: list[int] = []
        # A server refuses a text that its longest context cannot hold.
        for begin in range(0, len(text), self.longest):
            if len(self.text_ids) > 2 * self.longest:
                break
            piece = text[begin : begin + self.longest]
            body = {"prompt": piece, "add_special_tokens": False}
            self.text_ids += self._http.post("/tokenize", json=body).json()["tokens"]
        self.seed = seed

    def first_tokens(self, prompt: Sequence[int], max_tokens: int, policy: str) -> list[int]:
        """Return the first tokens of a greedy answer, and end it there."""
        found: list[int] = []
        body = self._body(prompt, max_tokens, policy, stream=True, return_token_ids=True)
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise click.ClickException(answer.read().decode())
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    found += choice.get("token_ids") or ()
                if len(found) >= _FIRST:
                    break
        return found[:_FIRST]

    def answer(self, prompt: Sequence[int], max_tokens: int, policy: str) -> tuple[list[int], int]:
        """Return a greedy answer's tokens, and how many of the prompt's were cached."""
        body = self._body(prompt, max_tokens, policy, return_token_ids=True)
        answer = self._http.post("/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            raise click.ClickException(answer.text)
        told = answer.json()
        cached: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return told["choices"][0]["token_ids"], cached

    def _body(
        self, prompt: Sequence[int], max_tokens: int, policy: str, **fields: Any
    ) -> dict[str, Any]:
        rope = _ROPE.get(policy, {"policy": policy})
        # Policies must not find each other's pages.
        same = {"temperature": 0, "ignore_eos": True, "cache_salt": f"{policy} {self.seed}"}
        body = {"prompt": list(prompt), "max_tokens": max_tokens, **same, **fields}
        return body if rope is None else {**body, "rope": rope}


def changed_answers(server: Server, policies: Sequence[str], num_prompts: int) -> list[list[str]]:
    """Return the first table's rows."""
    rng = random.Random(server.seed)  # noqa: S311  # no secret
    prompts = []
    for _ in range(num_prompts):
        size = rng.randint(16, max(16, min(_LONGEST_PROMPT, server.native_len // 2)))
        begin = rng.randrange(max(1, len(server.text_ids) - size))
        prompts.append(server.text_ids[begin : begin + size])
    untouched = [server.first_tokens(each, _FIRST, "none") for each in prompts]
    rows = []
    for policy in policies:
        short = [server.first_tokens(each, _FIRST, policy) for each in prompts]
        long = [
            server.first_tokens(each, server.longest - len(each) + 1, policy) for each in prompts
        ]
        by_length = sum(one != two for one, two in zip(short, long, strict=True))
        by_table = sum(one != two for one, two in zip(long, untouched, strict=True))
        rows.append([policy, f"{by_length} of {num_prompts}", f"{by_table} of {num_prompts}"])
        click.echo(f"first tokens, {policy}: {rows[-1][1:]}", err=True)
    return rows


def cached_tokens(server: Server, policies: Sequence[str], num_turns: int) -> list[list[str]]:
    """Return the second table's rows."""
    first, last = server.native_len // 2, server.longest - _FIRST
    ends = [first + (last - first) * turn // (num_turns - 1) for turn in range(num_turns)]
    rows = []
    for policy in policies:
        prompt: list[int] = []
        num_sent = num_cached = 0
        for end in ends:
            prompt += server.text_ids[len(prompt) : end]
            answer, cached = server.answer(prompt, _FIRST, policy)
            num_sent += len(prompt)
            num_cached += cached
            prompt += answer
        rows.append([policy, f"{num_cached} of {num_sent}", f"{num_cached / num_sent:.1%}"])
        click.echo(f"conversation, {policy}: {rows[-1][1:]}", err=True)
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(each)} |" for each in lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("url")
@click.option("--text", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--policies", default="none,fixed,grow,by_position", show_default=True)
@click.option("--prompts", default=100, show_default=True, help="0: no first table.")
@click.option("--turns", default=20, show_default=True, help="0: no second table.")
@click.option("--seed", default=0, show_default=True)
def main(url: str, text: Path, policies: str, prompts: int, turns: int, seed: int) -> None:  # noqa: PLR0917
    """Measure a running server. TEXT must be longer than its longest context."""
    server = Server(url, text.read_text(encoding="utf-8"), seed)
    if turns and len(server.text_ids) < server.longest:
        raise click.UsageError(
            f"--text has {len(server.text_ids)} tokens, the longest context {server.longest}"
        )
    named = policies.split(",")
    click.echo(f"{server.model}, trained for {server.native_len} tokens, serves {server.longest}\n")
    if prompts:
        head = ["policy", "change with max_tokens", "differ from the untouched table"]
        click.echo(f"{_table(head, changed_answers(server, named, prompts))}\n")
    if turns:
        head = ["policy", "prompt tokens found in the cache", "share"]
        click.echo(_table(head, cached_tokens(server, named, turns)))


if __name__ == "__main__":
    main()
