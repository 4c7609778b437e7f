"""`python -m benchmarks.server.streams NAME=FOLDER ...`: streams through HTTP without a model.

FOLDER is a checkout, and FOLDER@4 has `--stream-interval 4`. Its server runs in another process
(`stream_server.py`) over an engine that gives each of N streams one token a step. This process is
the client of all streams. It only stores what it receives; every event is parsed and checked
afterwards.
"""

import argparse
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

_SERVER = Path(__file__).with_name("stream_server.py")
_ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [7]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
}
_SILENCE_S = 60.0
_EVENT = re.compile(rb"data: (\{.*?\})\n\n")


class StreamError(Exception):
    """A stream that is not complete; the message names the fault."""


@dataclass(slots=True)
class Stream:
    """One connection and the pieces that it received."""

    sock: socket.socket
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # time.perf_counter(), bytes


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement."""

    route: str
    num_streams: int
    num_tokens: int  # of each stream
    rate: float  # tokens/s of all streams that the engine gives
    host_s: float  # seconds of each token that the engine's thread computes

    @property
    def plan(self) -> str:
        """Return the server's line for it."""
        step_s = self.num_streams / self.rate
        return f"{self.num_streams} {step_s} {self.num_streams * self.host_s}\n"


@dataclass(frozen=True, slots=True)
class Result:
    """The rate, the processor time and the gaps of one measurement."""

    tokens_per_s: float
    events_per_s: float
    processor_us: float  # of the server process, for each token
    gaps_ms: tuple[float, float, float]  # between events of a stream: median, 99th percentile, most


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    stdin: IO[str]
    stdout: IO[str]

    def follow(self, load: Load) -> None:
        """Set the load of the next streams."""
        self.stdin.write(load.plan)
        self.stdin.flush()
        if self.stdout.readline() != "ok\n":
            raise StreamError("the server has ended")

    @property
    def processor_s(self) -> float:
        """Return the processor time of all its threads."""
        # Linux's clock of a process, in nanoseconds; /proc/PID/stat has ticks of 10 ms.
        return time.clock_gettime((~self.process.pid << 3) | 2)


def main() -> None:
    """Measure every tree in turns, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="*", default=["here=."], metavar="NAME=FOLDER[@N]")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--routes", default="chat,completions")
    parser.add_argument(
        "--rates", default="20000", help="tokens/s that the engine would give alone"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--host-us", type=float, default=0.0, help="engine's own computing, for each token"
    )
    parsed = parser.parse_args()
    trees = dict(each.split("=", 1) for each in parsed.trees)
    loads = [
        Load(route, num, max(2, int(rate * parsed.seconds / num)), rate, parsed.host_us / 1e6)
        for route in parsed.routes.split(",")
        for num in map(int, parsed.streams.split(","))
        for rate in map(float, parsed.rates.split(","))
    ]
    found: dict[tuple[Load, str], list[Result]] = {}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(folder)) for name, folder in trees.items()}
        for server in servers.values():
            measure(server, Load("chat", 8, 50, 2000, 0))  # the first requests fill caches
        for _ in range(parsed.rounds):
            for load in loads:
                for name, server in servers.items():
                    found.setdefault((load, name), []).append(measure(server, load))
    first = next(iter(trees))
    sys.stdout.write(
        "| route | streams | engine, tokens/s | tree | tokens/s | events/s | processor us/token "
        "| of the first | gap ms, median | p99 | most |\n"
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    for load in loads:
        for name in trees:
            sys.stdout.write(row(load, name, found[load, name], found[load, first]))


def row(load: Load, name: str, results: Sequence[Result], first: Sequence[Result]) -> str:
    """Return a row with the medians over rounds, and that of the ratios of processor time."""
    pairs = zip(results, first, strict=True)
    ratio = np.median([each.processor_us / other.processor_us for each, other in pairs])
    rate, events, processor, middle, high, most = np.median(
        [
            (each.tokens_per_s, each.events_per_s, each.processor_us, *each.gaps_ms)
            for each in results
        ],
        axis=0,
    )
    return (
        f"| {load.route} | {load.num_streams} | {load.rate:,.0f} | {name} | {rate:,.0f} "
        f"| {events:,.0f} | {processor:.1f} | {ratio:.2f} "
        f"| {middle:.2f} | {high:.2f} | {most:.1f} |\n"
    )


@contextmanager
def serving(folder: str) -> Iterator[Server]:
    """Run a server of that checkout until the block ends; `@N` sets the tokens of an event."""
    folder, _, interval = folder.partition("@")
    environment = {**os.environ, "PYTHONPATH": str(Path(folder).resolve()), "OMP_NUM_THREADS": "1"}
    if interval:
        environment["ROPEWALK_STREAM_INTERVAL"] = interval
    with subprocess.Popen(  # noqa: S603  # our own command; -P: only this checkout's packages
        [sys.executable, "-P", str(_SERVER)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            port = int(process.stdout.readline() or 0)
            if not port:
                raise StreamError("the server did not start")
            yield Server(process, port, process.stdin, process.stdout)
        finally:
            process.terminate()


def measure(server: Server, load: Load) -> Result:
    """Measure from the moment when every stream has a token to the last one.

    Raises StreamError if a stream is not complete.
    """
    server.follow(load)
    streams = [_opened(server.port, load) for _ in range(load.num_streams)]
    began_s, ended_s, processor_s = _receive(streams, server)
    arrivals = [arrivals_of(stream.pieces, load.num_tokens) for stream in streams]
    gaps_ms = 1000 * np.concatenate([np.diff(times[times > began_s]) for times, _ in arrivals])
    num_events = sum(int((times > began_s).sum()) for times, _ in arrivals)
    num_tokens = sum(int(nums[times > began_s].sum()) for times, nums in arrivals)
    middle, high, most = np.percentile(gaps_ms, [50, 99, 100])
    return Result(
        num_tokens / (ended_s - began_s),
        num_events / (ended_s - began_s),
        1e6 * processor_s / num_tokens,
        (float(middle), float(high), float(most)),
    )


def _opened(port: int, load: Load) -> Stream:
    """Connect and send a request."""
    path, prompt = _ROUTES[load.route]
    body = json.dumps({**prompt, "max_tokens": load.num_tokens, "stream": True}).encode()
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    sock.settimeout(0)
    return Stream(sock)


def _receive(streams: Sequence[Stream], server: Server) -> tuple[float, float, float]:
    """Read all streams to their ends.

    Return the time when each had a token, the time of the last byte, and the server's processor
    time between them. Raises StreamError after a long silence.
    """
    began_s = before_s = now = 0.0
    silent, num_open = set(map(id, streams)), len(streams)
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        while num_open:
            ready = selector.select(_SILENCE_S)
            if not ready:
                raise StreamError(f"nothing was received for {_SILENCE_S:g} s")
            for key, _ in ready:
                stream = key.data
                data = stream.sock.recv(1 << 18)
                if not data:
                    selector.unregister(stream.sock)
                    stream.sock.close()
                    num_open -= 1
                    continue
                now = time.perf_counter()
                stream.pieces.append((now, data))
                if silent and b"data: {" in data:
                    silent.discard(id(stream))
                    if not silent:
                        began_s, before_s = now, server.processor_s
    return began_s, now, server.processor_s - before_s


def arrivals_of(
    pieces: Sequence[tuple[float, bytes]], num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of each event in seconds, and its number of tokens.

    Raises StreamError if a token is missing.
    """
    raw = b"".join(data for _, data in pieces)
    ends = np.cumsum([len(data) for _, data in pieces])
    times_s = np.array([time_s for time_s, _ in pieces])
    # The server never cuts an event into two chunks of HTTP.
    found = list(_EVENT.finditer(raw))
    choices = [json.loads(each[1])["choices"][0] for each in found]
    texts = [each["text"] if "text" in each else each["delta"]["content"] for each in choices]
    if "".join(texts) != "".join(f" t{number + 1}" for number in range(num_tokens)):
        num_found = "".join(texts).count(" ")
        raise StreamError(f"{num_found} of {num_tokens} tokens came, or in another order")
    if choices[-1]["finish_reason"] != "length" or b"data: [DONE]\n\n" not in raw:
        raise StreamError("a stream has no end")
    nums = np.array([text.count(" ") for text in texts])
    return times_s[np.searchsorted(ends, [each.end() for each in found])], nums


if __name__ == "__main__":
    try:
        main()
    except StreamError as error:
        sys.exit(f"Error: {error}")
