"""Slots of llama.cpp on disk: `python -m benchmarks.peers.kv_disk llama-server MODEL.gguf`.

The rows are those of `benchmarks.cache.kv_disk` for the same file. A prompt is computed, and its
slot is saved by `POST /slots/0?action=save`. After a restart, a client restores the slot by
name and sends the prompt again. Both calls count. The prompts are the same tokens. `--keep PATH`
keeps the slot for a later run with `--starts disk,memory`.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cache.kv_disk import busiest_ms, drop_file, prompt_of, thread_times
from benchmarks.server.own_server import free_port

_START_S = 120.0
_SLOT = "prompt.bin"


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", default="1024,8192", help="tokens of the prompts")
    parser.add_argument(
        "--starts", default="off,disk,memory", help="rows; without a kept slot off is first"
    )
    parser.add_argument("--keep", type=Path, help="folder of the slot, which outlives the run")
    parser.add_argument("--flags", default="--threads 2", help="of llama-server")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parsed = parser.parse_args()
    sys.stdout.write(
        "| tokens | start | first token, s | processor, s | tokens found | save or restore, s "
        "| MB |\n"
    )
    sys.stdout.write("|---:|---|---:|---:|---:|---:|---:|\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(dir=parsed.folder) as temporary:
        name = parsed.keep or Path(temporary)
        for length in map(int, parsed.lengths.split(",")):
            serve = [str(parsed.server), "--model", str(parsed.model), "--parallel", "1"]
            serve += ["--slot-save-path", str(name), "--ctx-size", str(length + 64)]
            starts = parsed.starts.split(",")
            measure([*serve, *shlex.split(parsed.flags)], name / _SLOT, length, starts)


def measure(serve: list[str], slot: Path, length: int, starts: list[str]) -> None:
    """Measure the first token of one prompt after each kind of start."""
    body = {"prompt": prompt_of(length), "n_predict": 1, "cache_prompt": True}
    for start in starts:
        if start == "disk":
            drop_file(slot)
        with running(serve) as (client, pid):
            before = thread_times(pid)
            began = time.monotonic()
            if start != "off":
                _post(client, "/slots/0?action=restore", {"filename": _SLOT})
            moved_s = time.monotonic() - began
            answer = _post(client, "/completion", body)
            seconds = time.monotonic() - began
            spent_s = busiest_ms(pid, before) / 1e3
            if start == "off":
                began = time.monotonic()
                _post(client, "/slots/0?action=save", {"filename": _SLOT})
                moved_s = time.monotonic() - began
        found = length - answer["timings"]["prompt_n"]
        size = slot.stat().st_size / 1e6
        cells = f"{start} | {seconds:.2f} | {spent_s:.2f} | {found:,} | {moved_s:.2f} | {size:,.0f}"
        sys.stdout.write(f"| {length:,} | {cells} |\n")
        sys.stdout.flush()


@contextmanager
def running(serve: list[str]) -> Iterator[tuple[httpx.Client, int]]:
    """Serve until the block ends."""
    port = free_port()
    process = subprocess.Popen(  # noqa: S603  # the command of whoever measures
        [*serve, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ),
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=3600) as client:
            ends = time.monotonic() + _START_S
            while not _is_ready(client):
                if process.poll() is not None or time.monotonic() > ends:
                    raise TimeoutError("llama-server does not answer")
                time.sleep(0.05)
            yield client, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    response.raise_for_status()
    return response.json()


if __name__ == "__main__":
    main()
