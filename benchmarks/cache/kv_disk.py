"""What pages on disk gain and cost: `python -m benchmarks.cache.kv_disk MODEL --lengths 1024,8192`.

Servers are started one after the other, so every row of the first table is after a restart. A
prompt is random tokens. `off` computes it without the disk, `written` computes it and writes its
pages. `disk` reads them after the system was asked to drop the files from its memory, and `memory`
while they are in it. Names may be repeated, so `written,disk,memory,disk,memory` computes once and
reads four times. `--keep PATH` keeps the pages for a later run with `--starts disk,memory`. Beside
the time there is the processor time of the server's busiest thread.

The other table asks a server with the disk and one without in turns for the first token of new
prompts, whose pages are written meanwhile. Times follow whatever else runs on the machine. So there
is also the processor time of the busiest thread of each server, which computes. Checksums and
writes are on another thread. `benchmarks.cache.kv_disk_decode` has the cost of writes while a model
decodes, which is smaller than the difference of two servers.
"""

import argparse
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.server.own_server import completion_status, free_port

_START_S = 300.0
_READY = '{"prompt": "a", "max_tokens": 1}'
_FIRST_ID, _LAST_ID = 16, 2000  # below the special tokens of most models
_SEED = 11
_STARTS = "off,written,disk,memory"


class Served(NamedTuple):
    """A server that answers."""

    url: str
    pid: int


class Pair(NamedTuple):
    """The times of one answer."""

    seconds: float
    thread_ms: float  # processor time of the busiest thread


def main() -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", default="1024,8192", help="tokens of the prompts")
    parser.add_argument("--starts", default=_STARTS, help="rows of the first table; empty: none")
    parser.add_argument("--writes", type=int, default=0, help="pairs of new prompts; 0: no table")
    parser.add_argument(
        "--first",
        choices=("without", "with"),
        default="without",
        help="server of a pair that starts first; the order alone may change rates by a fifth",
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--keep", type=Path, help="folder of pages; emptied if they are computed")
    parser.add_argument("--flags", default="", help='of the servers, as "--threads 1"')
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=parsed.folder) as name:
        serve = [str(parsed.model), *shlex.split(parsed.flags)]
        folder = parsed.keep or Path(name) / "kv"
        lengths = [int(each) for each in parsed.lengths.split(",") if each]
        starts = [each for each in parsed.starts.split(",") if each]
        restarted = lengths if starts else []
        if restarted:
            _write(
                "| tokens | start | first token, s | processor, s | tokens found | pages, MB/s |"
            )
            _write("|---:|---|---:|---:|---:|---:|")
        for length in restarted:
            measure_restarts(serve, folder, length, starts)
        if parsed.writes:
            with ExitStack() as stack:
                servers = {
                    name: stack.enter_context(server(serve, folder if name == "with" else None))
                    for name in sorted(("without", "with"), key=lambda each: each != parsed.first)
                }
                for length in lengths:
                    measure_writing(servers, length, parsed.writes)


def measure_restarts(serve: list[str], folder: Path, length: int, starts: list[str]) -> None:
    """Measure the first token of one prompt after each kind of start."""
    prompt = prompt_of(length)
    if starts[0] in {"off", "written"}:
        shutil.rmtree(folder, ignore_errors=True)
    for start in starts:
        if start == "disk":
            drop_from_memory(folder)
        with server(serve, None if start == "off" else folder) as served:
            if start != "off":
                wait_until_open(served.url)
            before = thread_times(served.pid)
            seconds, num_cached = first_token(served.url, prompt)
            spent_s = busiest_ms(served.pid, before) / 1e3
            rate = read_rate(served.url, folder) if num_cached else ""
        cells = f"{start} | {seconds:.2f} | {spent_s:.2f} | {num_cached:,} | {rate}"
        _write(f"| {length:,} | {cells} |")


def prompt_of(length: int) -> list[int]:
    """Return random tokens, for each length the same."""
    return random.Random(_SEED + length).choices(range(_FIRST_ID, _LAST_ID), k=length)  # noqa: S311


def measure_writing(servers: dict[str, Served], length: int, rounds: int) -> None:
    """Compare the first tokens of new prompts, whose pages one of the servers writes."""

    def measure(served: Served, draw: random.Random) -> Pair:
        prompt = draw.choices(range(_FIRST_ID, _LAST_ID), k=length)
        before = thread_times(served.pid)
        seconds, _ = first_token(served.url, prompt)
        return Pair(seconds, busiest_ms(served.pid, before))

    titles = ("first token, s", "processor time, ms")
    compare(servers, rounds, f"{length:,} new tokens", titles, measure)


def compare(
    servers: dict[str, Served],
    rounds: int,
    name: str,
    titles: tuple[str, str],
    measure: Callable[[Served, random.Random], Pair],
) -> None:
    """Measure both servers in each round, first one and then the other first; print a table."""
    found: dict[str, list[Pair]] = {each: [] for each in servers}
    for number in range(rounds):
        for each in sorted(found, reverse=number % 2 == 1):
            draw = random.Random(f"{_SEED} {name} {number}")  # noqa: S311
            found[each].append(measure(servers[each], draw))
    _write("")
    _write(f"| {name} | without | with | with / without in each pair: median, quartiles |")
    _write("|---|---:|---:|---|")
    for at, title in enumerate(titles):
        off, on = ([each[at] for each in found[of]] for of in ("without", "with"))
        ratios = [mine / other for mine, other in zip(on, off, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ends = f"{middle:.3f}, {low:.3f} to {high:.3f}"
        _write(f"| {title} | {statistics.median(off):.2f} | {statistics.median(on):.2f} | {ends} |")


@contextmanager
def server(serve: list[str], folder: Path | None) -> Iterator[Served]:
    """Serve until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "ropewalk", "serve", *serve, "--port", str(port)]
    if folder is not None:
        command += ["--kv-disk", str(folder), "--kv-disk-gib", "16"]
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(  # noqa: S603  # our own command
        command, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": root}
    )
    try:
        began = time.monotonic()
        while completion_status(port, _READY, 60) != 200:
            if process.poll() is not None or time.monotonic() - began > _START_S:
                raise TimeoutError("the server does not answer")
            time.sleep(0.05)
        yield Served(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait(60)


def wait_until_open(url: str) -> None:
    """Wait until a server has looked at its folder; the hash of the weights comes before."""
    ends = time.monotonic() + _START_S
    while "\nropewalk_kv_disk_info{" not in httpx.get(f"{url}/metrics", timeout=60).text:
        if time.monotonic() > ends:
            raise TimeoutError("the folder is not open")
        time.sleep(0.05)


def first_token(url: str, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the only token, and the tokens that were found."""
    began = time.monotonic()
    answer = _completion(url, {"prompt": prompt, "max_tokens": 1})
    seconds = time.monotonic() - began
    return seconds, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def busiest_ms(pid: int, before: dict[str, int]) -> float:
    """Return the milliseconds that the busiest thread of a process computed since `before`."""
    after = thread_times(pid)
    return max(spent - before.get(thread, 0) for thread, spent in after.items()) / 1e6


def thread_times(pid: int) -> dict[str, int]:
    """Return the nanoseconds that each thread of a process has computed. On Linux."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            found[path.parent.name] = int(path.read_text().split()[0])
    return found


def read_rate(url: str, folder: Path) -> str:
    """Return the MB/s of all reads of a server."""
    page = httpx.get(f"{url}/metrics").text
    values = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in page.splitlines()}
    seconds = float(values['ropewalk_kv_disk_seconds_total{way="read"}'])
    num_pages = float(values['ropewalk_kv_disk_pages_total{event="read"}'])
    page_bytes = next(folder.glob("v1/*/*/*")).stat().st_size
    return f"{num_pages * page_bytes / 1e6 / seconds:,.0f}"


def drop_from_memory(folder: Path) -> None:
    """Ask the system to write all files to the disk and to forget them."""
    for path in folder.glob("v1/*/*/*"):
        drop_file(path)


def drop_file(path: Path) -> None:
    """Ask the system to write a file to the disk and to forget it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _completion(url: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=3600)
    response.raise_for_status()
    return response.json()


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
