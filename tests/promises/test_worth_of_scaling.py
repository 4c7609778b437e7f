"""The reason for this server, measured again in small: docs/long-context.md."""

import csv
import subprocess
import sys

import pytest

NATIVE = 256
NONE, PINNED = "none", "yarn"
Rows = dict[tuple[str, int], dict[str, str]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The embedded model by method and length, as `ropewalk eval` measures it."""
    folder = tmp_path_factory.mktemp("evaluation")
    lens = ",".join(str(NATIVE * times // 2) for times in (1, 2, 8, 16))
    subprocess.run(
        [
            *(sys.executable, "-m", "ropewalk", "eval", "--output", str(folder)),
            *("--methods", f"{NONE},{PINNED}", "--rope-policies", "pinned"),
            *("--context-lens", lens, "--windows", "5", "--queries", "20", "--threads", "2"),
        ],
        check=True,
        timeout=280,
    )
    with (folder / "results.csv").open() as file:
        return {(row["method"], int(row["context_len"])): row for row in csv.DictReader(file)}


def test_long_contexts_collapse_without_scaling_and_live_with_it(rows: Rows) -> None:
    """Without scaling, perplexity is 1.5 times higher at 4 L and 4 times higher at 8 L.

    With scaling, perplexity at 4 L stays within 15 % of its value at L.
    """
    perplexity = {key: float(row["perplexity"]) for key, row in rows.items()}
    assert perplexity[NONE, 4 * NATIVE] > 1.5 * perplexity[PINNED, 4 * NATIVE]
    assert perplexity[NONE, 8 * NATIVE] > 4 * perplexity[PINNED, 8 * NATIVE]
    assert perplexity[PINNED, 4 * NATIVE] < 1.15 * perplexity[PINNED, NATIVE]


def test_short_contexts_pay_nothing(rows: Rows) -> None:
    """At L and below, a pinned deployment uses the untouched table."""
    for length in (NATIVE // 2, NATIVE):
        without, scaled = rows[NONE, length], rows[PINNED, length]
        assert float(scaled["perplexity"]) == pytest.approx(float(without["perplexity"]), rel=1e-3)
        assert scaled["retrieval"] == without["retrieval"]


def test_a_needle_far_back_is_found_only_with_scaling(rows: Rows) -> None:
    """Retrieval at 4 L is at least 80 % with scaling and at most 10 % without."""
    assert float(rows[PINNED, 4 * NATIVE]["retrieval"]) >= 0.8
    assert float(rows[NONE, 4 * NATIVE]["retrieval"]) <= 0.1
