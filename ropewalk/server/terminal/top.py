"""The server's latency by context length as a table, from two answers of /stats."""

import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ropewalk.server.terminal.connection import ClientError


def quantile(q: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return the value that a share `q` of the observations does not exceed; None without any.

    `counts` are cumulative, one for each of `bounds` and a last one for all observations.

    Source: Prometheus, "histogram_quantile()", linear interpolation inside a bucket.
    """
    if counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    at = bisect.bisect_left(counts, rank)
    if at >= len(bounds):
        return bounds[-1]
    lower, before = (0.0, 0) if at == 0 else (bounds[at - 1], counts[at - 1])
    inside = counts[at] - before
    if inside == 0:
        return bounds[at]
    return lower + (bounds[at] - lower) * ((rank - before) / inside)


_WINDOW_S = 60.0
_LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")


@dataclass(slots=True)
class History:
    """The answers of /stats of the last minute, and one before it."""

    answers: deque[tuple[float, dict[str, Any]]] = field(default_factory=deque)

    def add(self, now: float, stats: dict[str, Any]) -> None:
        """Keep an answer; `now` is in seconds. Raises ClientError if it has no times by name."""
        if "models" not in stats[_LATENCIES[0]]:
            raise ClientError("the server is of an earlier release, which has no times by name")
        if self.answers and stats["generated_tokens"] < self.answers[-1][1]["generated_tokens"]:
            self.answers.clear()  # a server has started again, or has left the router
        self.answers.append((now, stats))
        while len(self.answers) > 2 and self.answers[1][0] <= now - _WINDOW_S:
            self.answers.popleft()

    def table(self, *, since_start: bool) -> list[str]:
        """Return the lines to show: a state, and a row for each context bucket with requests.

        If several deployments have requests, each has rows under its name.
        """
        now, stats = self.answers[-1]
        then, older = self.answers[0]
        is_window = not since_start and len(self.answers) > 1
        lines = [
            f"{stats['requests_running']} running, {stats['requests_waiting']} waiting, "
            f"cache {stats['kv_cache_usage_ratio']:.0%} of {stats['kv_cache_tokens']:,} tokens",
        ]
        if len(self.answers) > 1:
            num_tokens = stats["generated_tokens"] - older["generated_tokens"]
            lines[0] += f", {num_tokens / (now - then):,.0f} tokens/s"
        for name, line_of in (("kv_offload", _memory_line), ("kv_disk", _disk_line)):
            if stats.get(name) is not None:
                lines.append(line_of(stats[name], older.get(name) if is_window else None))
        period = f"last {now - then:.0f} s" if is_window else "since the server's start"
        lines += [
            "",
            _row("context", "requests", ["first p50", "p95", "token p50", "p95"]) + f"   {period}",
        ]
        blocks = {
            name: rows
            for name in stats[_LATENCIES[0]]["models"]
            if (rows := _rows(stats, older if is_window else None, name))
        }
        for name, rows in blocks.items():
            lines += rows if len(blocks) == 1 else [name, *rows]
        return lines


def _disk_line(disk: dict[str, Any], older: dict[str, Any] | None) -> str:
    """Return the line of the pages on disk, with counts since `older` or the server's start."""
    new = _since(disk, older)
    return (
        f"disk {disk['bytes'] / 2**30:.3g} GiB, {new('tokens_read')} tokens read, "
        f"{new('pages_written')} pages written, {new('pages_dropped')} dropped, "
        f"{new('bad_files')} bad files{', paused' if disk['paused'] else ''}"
    )


def _memory_line(memory: dict[str, Any], older: dict[str, Any] | None) -> str:
    """Return the line of the pages in host memory, with counts as `_disk_line` has them."""
    new = _since(memory, older)
    return (
        f"host memory {memory['bytes'] / 2**30:.3g} GiB, {new('pages_read')} pages read, "
        f"{new('pages_evicted')} evicted"
    )


def _since(counts: dict[str, Any], older: dict[str, Any] | None) -> Callable[[str], str]:
    """Return what tells how far a count has grown since `older`, or since the server's start."""
    return lambda name: f"{counts[name] - (older[name] if older is not None else 0):,}"


def _rows(stats: dict[str, Any], older: dict[str, Any] | None, model_name: str) -> list[str]:
    """Return a row for each context bucket in which a deployment had requests since `older`."""
    rows = []
    bounds = stats["context_bounds"]
    for at in range(len(bounds) + 1):
        label = f"<= {bounds[at]:,}" if at < len(bounds) else f"> {bounds[-1]:,}"
        first, following = (_new_counts(stats, older, name, model_name, at) for name in _LATENCIES)
        cells = [
            quantile(q, stats[name]["bounds"], counts)
            for name, counts in zip(_LATENCIES, (first, following), strict=True)
            for q in (0.5, 0.95)
        ]
        if any(cell is not None for cell in cells):
            rows.append(_row(label, f"{first[-1]:,}", [_duration(cell) for cell in cells]))
    return rows


def _new_counts(
    stats: dict[str, Any], older: dict[str, Any] | None, latency: str, model_name: str, at: int
) -> list[int]:
    """Return the counts of one context bucket since `older`, or since the server's start."""
    zeros = [0] * (len(stats[latency]["bounds"]) + 1)

    def counts_in(answer: dict[str, Any]) -> list[int]:
        models = answer[latency]["models"]
        counts: list[int] = models[model_name]["counts"][at] if model_name in models else zeros
        return counts

    past = zeros if older is None else counts_in(older)
    return [new - old for new, old in zip(counts_in(stats), past, strict=True)]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"


def _row(label: str, count: str, cells: Sequence[str]) -> str:
    return f"{label:>10} {count:>9} " + " ".join(f"{cell:>10}" for cell in cells)
