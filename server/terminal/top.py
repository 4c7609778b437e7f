"""The server's latency by context length as a table, from two answers of /stats."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.terminal.quantile import quantile

_WINDOW_S = 60.0
_LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")


@dataclass(slots=True)
class History:
    """The answers of /stats of the last minute, and one before it."""

    answers: deque[tuple[float, dict[str, Any]]] = field(default_factory=deque)

    def add(self, now: float, stats: dict[str, Any]) -> None:
        """Keep an answer; `now` is in seconds."""
        self.answers.append((now, stats))
        while len(self.answers) > 2 and self.answers[1][0] <= now - _WINDOW_S:
            self.answers.popleft()

    def table(self, *, since_start: bool) -> list[str]:
        """Return the lines to show: a state and one row for each context bucket with requests."""
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
        period = f"last {now - then:.0f} s" if is_window else "since the server's start"
        lines += [
            "",
            _row("context", "requests", ["first p50", "p95", "token p50", "p95"]) + f"   {period}",
        ]
        bounds = stats["context_bounds"]
        for at in range(len(bounds) + 1):
            label = f"<= {bounds[at]:,}" if at < len(bounds) else f"> {bounds[-1]:,}"
            cells = []
            num_requests = 0
            for name in _LATENCIES:
                counts = stats[name]["counts"][at]
                if is_window:
                    past = older[name]["counts"][at]
                    counts = [new - old for new, old in zip(counts, past, strict=True)]
                if name == _LATENCIES[0]:
                    num_requests = counts[-1]
                cells += [quantile(q, stats[name]["bounds"], counts) for q in (0.5, 0.95)]
            if any(cell is not None for cell in cells):
                lines.append(_row(label, f"{num_requests:,}", [_duration(cell) for cell in cells]))
        return lines


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"


def _row(label: str, count: str, cells: Sequence[str]) -> str:
    return f"{label:>10} {count:>9} " + " ".join(f"{cell:>10}" for cell in cells)
