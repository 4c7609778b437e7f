"""The whole server on the device, with `ropewalk serve` and `ropewalk bench` as processes.

Latency against context length is then read from /metrics, as an operator reads it.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch

from benchmarks.gpu.engine import free_memory
from benchmarks.gpu.model_inputs import ModelSizes, random_model
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

_START_S, _STOP_S = 180, 30
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_HISTOGRAMS = {
    "first_token": "ropewalk_time_to_first_token_seconds",
    "next_token": "ropewalk_inter_token_latency_seconds",
}
# (histogram, context bucket) -> upper bound in seconds -> observations up to it; under _SUM, sum.
Counts = dict[tuple[str, str], dict[float, float]]
_SUM = -1.0  # the key of the sum; no bound is negative


class ServerError(Exception):
    """The server or its load did not run; the message gives the reason."""


def serve_and_load(sizes: ModelSizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield rows of `ropewalk bench` and of /metrics in the meantime. Raises ServerError."""
    with TemporaryDirectory(prefix="ropewalk-model-") as folder:
        _write_model(sizes, Path(folder), device)
        with _running(sizes, folder, device) as url:
            for concurrency in sizes.server.concurrencies:
                before = scrape(url)
                for result in _load(url, sizes, concurrency, Path(folder) / "bench.json"):
                    yield {"part": "server_bench", "concurrency": concurrency, **result}
                for row in latencies(before, scrape(url)):
                    yield {"part": "server_metrics", "concurrency": concurrency, **row}


def _write_model(sizes: ModelSizes, folder: Path, device: torch.device) -> None:
    """Write random weights as safetensors, and the embedded model's tokenizer."""
    model = random_model(sizes.server.shape, sizes.native_len, sizes.dtype, device)
    model.save_pretrained(folder)
    del model
    free_memory()
    for name in _TOKENIZER_FILES:
        shutil.copy(EMBEDDED_MODEL / name, folder)


@contextmanager
def _running(sizes: ModelSizes, folder: str, device: torch.device) -> Iterator[str]:
    """Start a server on a free local port, yield its address, and stop it after the block."""
    scaling = json.dumps({"rope_type": "yarn", "factor": sizes.factor})
    command = [
        *(sys.executable, "-m", "ropewalk", "serve", folder, "--port", "0"),
        *("--device", device.type, "--dtype", str(sizes.dtype).removeprefix("torch.")),
        *("--rope-scaling", scaling, "--max-num-batched-tokens", str(sizes.chunk_len)),
        *("--step-target-seconds", "0"),
        *(("--kv-cache-tokens", str(sizes.cache_tokens)) if device.type == "cpu" else ()),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603  # our own
    assert process.stderr is not None
    lines: list[str] = []
    found = threading.Event()

    def read(told: IO[str]) -> None:
        with told:
            for line in told:
                lines.append(line)
                if "listening on" in line:
                    found.set()
        found.set()  # the process has ended

    reader = threading.Thread(target=read, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        found.wait(_START_S)
        address = re.search(r"listening on\s+(https?://\S+)", "".join(lines))
        if address is None:
            raise ServerError("the server did not start: " + "".join(lines[-5:]).strip())
        yield address[1]
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()


def _load(url: str, sizes: ModelSizes, concurrency: int, path: Path) -> Iterator[dict[str, Any]]:
    """Run `ropewalk bench` once; yield one row per context length."""
    server = sizes.server
    command = [
        *(sys.executable, "-m", "ropewalk", "bench", url, "--json", str(path)),
        *("--context-lens", ",".join(map(str, server.context_lens))),
        *("--requests", str(max(server.num_requests, concurrency))),
        *("--concurrency", str(concurrency), "--output-tokens", str(server.output_tokens)),
    ]
    begin = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own
    if ended.returncode != 0:
        raise ServerError(f"ropewalk bench: {(ended.stderr or ended.stdout)[-500:].strip()}")
    took = time.perf_counter() - begin
    for result in json.loads(path.read_text())["results"]:
        first, following = result["time_to_first_token_s"], result["inter_token_s"]
        yield {
            "context": result["context_len"],
            "first_token_p50_s": first["p50"],
            "first_token_p95_s": first["p95"],
            "next_token_p50_s": following["p50"],
            "next_token_p95_s": following["p95"],
            "output_tokens_s": result["output_tokens_per_s"],
            "load_s": took,
        }


def scrape(url: str) -> Counts:
    """Return the two latency histograms by context, as /metrics has them now."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415  # optional

    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # noqa: S310  # our own
        text = answer.read().decode()
    counts: Counts = {}
    for family in text_string_to_metric_families(text):
        for what, name in _HISTOGRAMS.items():
            if family.name != name:
                continue
            for sample in family.samples:
                place = counts.setdefault((what, sample.labels["context_bucket"]), {})
                if sample.name == f"{name}_sum":
                    place[_SUM] = sample.value
                elif sample.name == f"{name}_bucket":
                    place[float(sample.labels["le"])] = sample.value
    return counts


def latencies(before: Counts, after: Counts) -> Iterator[dict[str, Any]]:
    """Yield a row per context bucket with new observations, shortest contexts first."""
    buckets = sorted({bucket for _, bucket in after}, key=float)
    for bucket in buckets:
        row: dict[str, Any] = {"context_bucket": bucket}
        for what in _HISTOGRAMS:
            now, then = after.get((what, bucket), {}), before.get((what, bucket), {})
            new = {bound: number - then.get(bound, 0.0) for bound, number in now.items()}
            total = new.pop(_SUM, 0.0)
            number = new.get(float("inf"), 0.0)
            row[f"{what}_count"] = int(number)
            row[f"{what}_mean_s"] = total / number if number else None
            row[f"{what}_p50_s"] = median_of(new) if number else None
        if row["first_token_count"] or row["next_token_count"]:
            yield row


def median_of(new: Mapping[float, float]) -> float:
    """Return the median of observations that are counted up to each bound.

    It is interpolated linearly between bounds, as Prometheus does. There must be an observation. If
    the median is in the last bucket, which has no upper bound, its lower bound is returned.
    """
    bounds = [0.0, *sorted(new)]
    half = new[float("inf")] / 2
    for low, high in pairwise(bounds):
        below, up_to = new.get(low, 0.0), new[high]
        if up_to >= half and up_to > below:
            if high == float("inf"):
                return low
            return low + (high - low) * (half - below) / (up_to - below)
    raise AssertionError("counts only grow with their bounds")
