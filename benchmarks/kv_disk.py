"""What pages on disk gain and cost: `python -m benchmarks.kv_disk MODEL --lengths 1024,8192`.

Servers are started one after the other, so every row of the first table is after a restart. A
prompt is random tokens. `off` computes it without the disk, `written` computes it and writes its
pages. `disk` reads them after the system was asked to drop the files from its memory, and `memory`
while they are in it.

The second table decodes with and without the disk, in turns. Its rates follow whatever else runs on
the machine. So it also has the processor time of the thread that decodes, which is the busiest one
of the server. Checksums and writes are on another thread.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.own_server import completion_status, free_port

_START_S = 300.0
_READY = '{"prompt": "a", "max_tokens": 1}'
_FIRST_ID, _LAST_ID = 16, 2000  # below the special tokens of most models
_SEED = 11


class Served(NamedTuple):
    """A server that answers."""

    url: str
    pid: int


class Decoded(NamedTuple):
    """How an answer was decoded."""

    rate: float  # tokens a second after the first, as the server timed them
    thread_ms: float  # processor time of a token, of the busiest thread


def main() -> None:
    """Measure, and print two tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", default="1024,8192", help="tokens of the prompts")
    parser.add_argument("--rounds", type=int, default=5, help="of decoding; 0: no such table")
    parser.add_argument("--decoded", type=int, default=256, help="tokens of a decoded answer")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--flags", default="", help='of the servers, as "--threads 1"')
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=parsed.folder) as name:
        serve = [str(parsed.model), *shlex.split(parsed.flags)]
        folder = Path(name) / "kv"
        lengths = [int(each) for each in parsed.lengths.split(",") if each]
        if lengths:
            _write("| tokens | start | first token, s | tokens found | pages, MB/s |")
            _write("|---:|---|---:|---:|---:|")
        for length in lengths:
            measure_restarts(serve, folder, length)
        if parsed.rounds:
            measure_decoding(serve, folder, parsed.rounds, parsed.decoded)


def measure_restarts(serve: list[str], folder: Path, length: int) -> None:
    """Measure the first token of one prompt after each kind of start."""
    prompt = random.Random(_SEED + length).choices(range(_FIRST_ID, _LAST_ID), k=length)  # noqa: S311
    shutil.rmtree(folder, ignore_errors=True)
    for start in ("off", "written", "disk", "memory"):
        if start == "disk":
            drop_from_memory(folder)
        with server(serve, None if start == "off" else folder) as served:
            time.sleep(1.0)  # the folder is open soon after the start
            seconds, num_cached = first_token(served.url, prompt)
            rate = read_rate(served.url, folder) if num_cached else ""
        _write(f"| {length:,} | {start} | {seconds:.2f} | {num_cached:,} | {rate} |")


def measure_decoding(serve: list[str], folder: Path, rounds: int, num_decoded: int) -> None:
    """Compare the decode rates of servers with and without the disk, in turns."""
    found: dict[str, list[Decoded]] = {"without": [], "with": []}
    draw = random.Random(_SEED)  # noqa: S311
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(server(serve, folder if name == "with" else None))
            for name in found
        }
        for number in range(rounds):
            prompt = draw.choices(range(_FIRST_ID, _LAST_ID), k=200)
            for name in sorted(found, reverse=number % 2 == 1):
                found[name].append(decode(servers[name], prompt, num_decoded))
    _write("")
    _write("| decode | without | with | with / without in each pair: median, quartiles |")
    _write("|---|---:|---:|---|")
    for field, title in (("rate", "tokens/s"), ("thread_ms", "processor time of a token, ms")):
        off, on = ([getattr(each, field) for each in found[name]] for name in ("without", "with"))
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
    root = str(Path(__file__).parents[1])
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


def first_token(url: str, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the only token, and the tokens that were found."""
    began = time.monotonic()
    answer = _completion(url, {"prompt": prompt, "max_tokens": 1})
    seconds = time.monotonic() - began
    return seconds, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def decode(served: Served, prompt: list[int], num_tokens: int) -> Decoded:
    """Decode an answer to a prompt whose pages are cached."""
    _completion(served.url, {"prompt": prompt, "max_tokens": 1})
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    before = thread_times(served.pid)
    answer = _completion(served.url, {**body, "timings_per_token": True})
    after = thread_times(served.pid)
    busiest_ns = max(spent - before.get(thread, 0) for thread, spent in after.items())
    return Decoded(answer["timings"]["predicted_per_second"], busiest_ns / 1e6 / num_tokens)


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
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _completion(url: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    return response.json()


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
