"""Quantiles of a histogram, against a Prometheus that computes them over the same counts."""

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ropewalk.server.terminal.connection import ClientError
from ropewalk.server.terminal.top import History, quantile
from tests.docker.real_prometheus import tool

BOUNDS = [0.001, 0.01, 0.1, 1.0, 10.0]


def _case(seed: int) -> list[int]:
    rng = random.Random(seed)
    found = [0]
    for _ in range(len(BOUNDS) + 1):
        found.append(found[-1] + rng.choice((0, 0, 1, 3, 50)))
    return found[1:]


def test_quantiles_equal_prometheus(tmp_path: Path) -> None:
    """promtool evaluates histogram_quantile over the same cumulative counts."""
    promtool = tool("promtool")
    tests = []
    for seed in range(20):
        counts = _case(seed)
        if not counts[-1]:
            continue
        labels = [*map(str, BOUNDS), "+Inf"]
        series = [
            {"series": f'h_bucket{{le="{label}"}}', "values": str(count)}
            for label, count in zip(labels, counts, strict=True)
        ]
        expressions = [
            {
                "expr": f"histogram_quantile({q}, h_bucket)",
                "eval_time": "0m",
                "exp_samples": [{"labels": "{}", "value": quantile(q, BOUNDS, counts)}],
            }
            for q in (0.1, 0.5, 0.95, 0.99)
        ]
        tests.append({"interval": "1m", "input_series": series, "promql_expr_test": expressions})
    assert len(tests) > 15
    path = tmp_path / "quantiles.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    ran = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_observation_has_no_quantile() -> None:
    """An empty histogram gives None, and one beyond the last bound gives that bound."""
    assert quantile(0.5, BOUNDS, [0] * 6) is None
    assert quantile(0.5, BOUNDS, [0, 0, 0, 0, 0, 3]) == 10.0


def _stats(count: int, *models: str) -> dict[str, Any]:
    counts = [[0, 0, count, count, count, count], [0] * 6]
    latency = {"bounds": BOUNDS, "models": {name: {"counts": counts} for name in models}}
    return {
        "context_bounds": [16],
        "requests_running": 1,
        "requests_waiting": 0,
        "kv_cache_usage_ratio": 0.25,
        "kv_cache_tokens": 1000,
        "generated_tokens": 10 * count,
        "time_to_first_token_seconds": latency,
        "inter_token_latency_seconds": latency,
    }


def test_a_table_covers_the_last_minute() -> None:
    """Older answers are forgotten, and the counts of the window are differences."""
    history = History()
    for second in range(0, 200, 10):
        history.add(float(second), _stats(second, "m"))
    lines = history.table(since_start=False)
    assert len(history.answers) == 7
    assert "10 tokens/s" in lines[0]
    assert lines[2].endswith("last 60 s")
    assert lines[3].split()[:3] == ["<=", "16", "60"]
    assert "since the server's start" in history.table(since_start=True)[2]


def test_pages_on_disk_and_in_host_memory_have_lines_with_the_counts_of_the_window() -> None:
    """The size and the pause are those of now."""
    history = History()
    for second, num in ((0.0, 100), (60.0, 1600)):
        counts = {"tokens_read": num, "pages_written": 7, "pages_dropped": 0, "bad_files": 0}
        disk = {"bytes": 2**31, "paused": second > 0, **counts}
        memory = {"bytes": 2**29, "pages_read": num, "pages_evicted": 1}
        history.add(second, {**_stats(5, "m"), "kv_disk": disk, "kv_offload": memory})
    for since_start, read, written in ((False, "1,500", 0), (True, "1,600", 7)):
        lines = history.table(since_start=since_start)
        evicted = 1 if since_start else 0
        assert lines[1] == f"host memory 0.5 GiB, {read} pages read, {evicted} evicted"
        told = f"disk 2 GiB, {read} tokens read, {written} pages written"
        assert lines[2] == f"{told}, 0 dropped, 0 bad files, paused"


def test_several_deployments_have_rows_of_their_own() -> None:
    """One that is new in the window counts from zero, and one without requests is left out."""
    history = History()
    history.add(0.0, _stats(5, "static"))
    history.add(60.0, _stats(5, "static", "dynamic"))
    assert [line.split()[0] for line in history.table(since_start=True)[3:]] == [
        "static",
        "<=",
        "dynamic",
        "<=",
    ]
    (row,) = history.table(since_start=False)[3:]
    assert row.split()[:3] == ["<=", "16", "5"]


def test_a_server_of_an_earlier_release_is_a_sentence() -> None:
    """Its /stats has the totals only."""
    stats = _stats(5, "m")
    del stats["time_to_first_token_seconds"]["models"]
    with pytest.raises(ClientError, match="earlier release"):
        History().add(0.0, stats)
