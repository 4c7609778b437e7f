"""The reason for this server, measured again in small: benchmarks/results/quality.md."""

import csv
from pathlib import Path

import pytest

from tests.servers.processes import run_here

NATIVE = 256
NONE, SCALED = "none", "yarn"
Rows = dict[tuple[str, int], dict[str, str]]


def evaluated(folder: Path, *context_lens: int, **counts: int) -> Rows:
    """The embedded model by method and length, as `ropewalk eval` measures it."""
    ended = run_here(
        *("eval", "--output", str(folder), "--methods", f"{NONE},{SCALED}"),
        *("--rope-policies", "by_position", "--context-lens", ",".join(map(str, context_lens))),
        *(word for name, count in counts.items() for word in (f"--{name}", str(count))),
    )
    assert ended.returncode == 0, ended.stderr
    with (folder / "results.csv").open() as file:
        return {(row["method"], int(row["context_len"])): row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Perplexities up to 8 L."""
    folder = tmp_path_factory.mktemp("texts")
    return evaluated(folder, NATIVE // 2, NATIVE, 4 * NATIVE, 8 * NATIVE, windows=3, queries=0)


@pytest.fixture(scope="module")
def needles(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Needles found up to 4 L."""
    folder = tmp_path_factory.mktemp("needles")
    return evaluated(folder, NATIVE // 2, NATIVE, 4 * NATIVE, windows=0, queries=10)


def test_long_contexts_collapse_without_scaling_and_live_with_it(texts: Rows) -> None:
    """Without scaling, perplexity is 1.5 times higher at 4 L and 4 times higher at 8 L.

    With scaling, perplexity at 4 L stays within 15 % of its value at L.
    """
    perplexity = {key: float(row["perplexity"]) for key, row in texts.items()}
    assert perplexity[NONE, 4 * NATIVE] > 1.5 * perplexity[SCALED, 4 * NATIVE]
    assert perplexity[NONE, 8 * NATIVE] > 4 * perplexity[SCALED, 8 * NATIVE]
    assert perplexity[SCALED, 4 * NATIVE] < 1.15 * perplexity[SCALED, NATIVE]


def test_short_contexts_pay_nothing(texts: Rows, needles: Rows) -> None:
    """At L and below, the default policy uses the untouched table."""
    for length in (NATIVE // 2, NATIVE):
        without, scaled = (float(texts[each, length]["perplexity"]) for each in (NONE, SCALED))
        assert scaled == pytest.approx(without, rel=1e-3)
        assert needles[SCALED, length]["retrieval"] == needles[NONE, length]["retrieval"] != ""


def test_a_needle_far_back_is_found_only_with_scaling(needles: Rows) -> None:
    """Retrieval at 4 L is at least 80 % with scaling and at most 10 % without."""
    assert float(needles[SCALED, 4 * NATIVE]["retrieval"]) >= 0.8
    assert float(needles[NONE, 4 * NATIVE]["retrieval"]) <= 0.1
