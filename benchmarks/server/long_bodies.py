"""Measure the largest bodies beside other clients: `python -m benchmarks.server.long_bodies URL`.

A running server gives one stream all the time, and its `/health` is asked every 10 ms. Meanwhile
another process sends one large body of each kind. The table has the longest gap between two tokens
of the stream, and the longest answer of `/health`. FLAGS are those of the server.
"""

import argparse
import http.client
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import urlsplit

import click

from ropewalk.server.corpus.held_out import library_documents

FLAGS = (
    *("--rope-scaling", '{"rope_type": "yarn", "factor": 1024}', "--threads", "1"),
    *("--kv-cache-tokens", "320000"),
)
_SETTLE_S = 0.5  # before and after each body


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}


def _code(size: int) -> str:
    text = "".join(each.text for each in library_documents(held_out=True))
    return (text * (size // len(text) + 1))[:size]


def bodies(context: int) -> Mapping[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Return the routes and the makers of all kinds of bodies, near the limits of a context."""
    rng = random.Random(0)  # noqa: S311  # no secret
    largest = 2**20 + 64 * context - 4096  # bytes, by default
    size = largest // 4 * 3  # of a text whose line ends and quotes are escaped
    ids = [rng.randrange(2048) for _ in range(131_072 + 4 * context - 8)]
    digits = "0123456789" * (largest // 10)
    names = {f"name{n}": "" for n in range(65_000)}
    tool = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(30_000)}}
    function = {"type": "function", "function": {"name": "f", "parameters": tool}}
    many = [{"role": "user", "content": "a"}] * 26_000
    short = {"role": "user", "content": "a"}
    return {
        "completions, code": ("/v1/completions", lambda: {"prompt": _code(size)}),
        "completions, digits": ("/v1/completions", lambda: {"prompt": digits}),
        "completions, ids": ("/v1/completions", lambda: {"prompt": ids}),
        "completions, wrong ids": ("/v1/completions", lambda: {"prompt": [*ids, -1]}),
        "completions, names": ("/v1/completions", lambda: {"prompt": "a", **names}),
        "completions, echo": (
            "/v1/completions",
            lambda: {"prompt": _code(40_000), "echo": True, "max_tokens": 1, "stream": True},
        ),
        "chat, code": ("/v1/chat/completions", lambda: _chat(_code(size))),
        "chat, messages": ("/v1/chat/completions", lambda: {"messages": many, "max_tokens": 1}),
        "chat, a tool": ("/v1/chat/completions", lambda: _chat("a", tools=[function])),
        "chat, prediction": (
            "/v1/chat/completions",
            lambda: _chat("a", prediction={"type": "content", "content": _code(size)}),
        ),
        "responses, code": ("/v1/responses", lambda: {"input": _code(size)}),
        "messages, digits": ("/v1/messages", lambda: _chat(digits)),
        "count_tokens, code": (
            "/v1/messages/count_tokens",
            lambda: {"messages": [{**short, "content": _code(size)}]},
        ),
        "tokenize, code of 1 MB": ("/tokenize", lambda: {"prompt": _code(10**6)}),
        "tokenize, code": ("/tokenize", lambda: {"prompt": _code(size)}),
        "tokenize, digits of 1 MB": ("/tokenize", lambda: {"prompt": digits[: 10**6]}),
        "detokenize": ("/detokenize", lambda: {"tokens": ids[: 2**20]}),
    }


class _Watch(threading.Thread):
    """The longest time between two lines of a stream, or of an answer of /health."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.longest_s = 0.0
        self._is_over = False

    def end(self) -> None:
        self._is_over = True
        self.join()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self._url).netloc, timeout=120)


class _Stream(_Watch):
    # Short, so that its own steps do not become slower.
    _BODY = json.dumps({"prompt": "\n", "max_tokens": 2000, "ignore_eos": True, "stream": True})

    def run(self) -> None:
        while not self._is_over:
            connection = self._connection()
            connection.request("POST", "/v1/completions", self._BODY, _JSON)
            answer = connection.getresponse()
            last = time.perf_counter()
            while not self._is_over and answer.readline():
                now = time.perf_counter()
                self.longest_s = max(self.longest_s, now - last)
                last = now
            connection.close()


class _Health(_Watch):
    def run(self) -> None:
        connection = self._connection()
        while not self._is_over:
            start = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.longest_s = max(self.longest_s, time.perf_counter() - start)
            time.sleep(0.01)
        connection.close()


_JSON = {"Content-Type": "application/json"}


def _send(url: str, context: int, kind: str) -> None:
    """Send the body of one kind when a line comes; write its bytes, and status and seconds."""
    route, make = bodies(context)[kind]
    content = json.dumps(make()).encode()
    click.echo(len(content))
    sys.stdin.readline()
    start = time.perf_counter()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    connection.request("POST", route, content, _JSON)
    answer = connection.getresponse()
    answer.read()
    click.echo(f"{answer.status} {time.perf_counter() - start}")


@contextmanager
def _sender(url: str, context: int, kind: str) -> Iterator[tuple[IO[str], IO[str]]]:
    """Start a process with an interpreter of its own, and yield its input and output."""
    command = [sys.executable, "-m", "benchmarks.server.long_bodies", url, "--kind", kind]
    process = subprocess.Popen(  # noqa: S603  # this module
        [*command, "--send", str(context)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdin, process.stdout
    finally:
        process.kill()
        process.communicate()


def measured(url: str, kinds: list[str]) -> Iterator[tuple[str, int, int, float, float, float]]:
    """Yield kind, bytes, status, seconds, and the longest gap and answer of /health in seconds.

    No kinds: all of them.
    """
    with urllib.request.urlopen(f"{url}/v1/models") as answer:  # noqa: S310  # our own server
        context: int = json.load(answer)["data"][0]["max_model_len"]
    stream, health = _Stream(url), _Health(url)
    stream.start()
    health.start()
    time.sleep(2)
    try:
        for kind in ["nothing", *(kinds or bodies(context))]:
            num_bytes, status, seconds = 0, 0, 2.0
            if kind == "nothing":
                stream.longest_s = health.longest_s = 0.0
                time.sleep(seconds)
            else:
                with _sender(url, context, kind) as (commands, answers):
                    num_bytes = int(answers.readline())
                    time.sleep(_SETTLE_S)
                    stream.longest_s = health.longest_s = 0.0
                    commands.write("now\n")
                    commands.flush()
                    told = answers.readline().split()
                    status, seconds = int(told[0]), float(told[1])
                    time.sleep(_SETTLE_S)
            found = stream.longest_s, health.longest_s
            yield kind, num_bytes, status, seconds, *found
    finally:
        stream.end()
        health.end()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", metavar="URL", help=f"a server with {' '.join(FLAGS)}")
    parser.add_argument("--kind", action="append", default=[], help="default: all")
    parser.add_argument("--send", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        _send(options.url, options.send, *options.kind)
        return
    click.echo("| body | MB | status | s | longest gap, ms | /health, ms |")
    click.echo("|---|---:|---:|---:|---:|---:|")
    found = measured(options.url, options.kind)
    for kind, num_bytes, status, seconds, gap_s, health_s in found:
        row = f"| {kind} | {num_bytes / 1e6:.1f} | {status or ''} | {seconds:.1f} "
        click.echo(f"{row}| {gap_s * 1e3:.0f} | {health_s * 1e3:.0f} |")


if __name__ == "__main__":
    main()
