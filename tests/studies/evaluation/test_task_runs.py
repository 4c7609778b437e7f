"""`ropewalk eval --tasks` on the embedded model: files, scores, effective length, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ropewalk.studies.evaluation.command import evaluate
from ropewalk.studies.evaluation.plan import LengthPlan, Variant
from ropewalk.studies.evaluation.report import Answered, LengthReport, LengthRow, table
from ropewalk.studies.ruler.sample import Draft, Sample, SampleScore

LENS = (256, 384)
ARGUMENTS = ("--tasks", "fwe", "--methods", "none,yarn", "--rope-policies", "grow", "--samples")


def invoke(*arguments: str) -> Result:
    """Run the command in this process."""
    ended = CliRunner().invoke(evaluate, arguments)
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    return ended


def upstream_score(path: Path) -> float:
    """Transcription of RULER's evaluate.py and string_match_all, for one file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    shares = []
    for line in lines:
        pred = "".join("\n" if ord(each) < 32 else each for each in line["pred"].strip()).strip()
        found = [1.0 if each.lower() in pred.lower() else 0.0 for each in line["outputs"]]
        shares.append(sum(found) / len(found))
        assert line["others"].get("id", line["index"]) == line["index"]
    return round(sum(shares) / len(shares) * 100, 2)


@pytest.mark.costly
def test_a_run_writes_what_upstreams_scorer_reads(tmp_path: Path) -> None:
    """The numbers of the report are those of RULER's rule over the files."""
    lens = ",".join(map(str, LENS))
    ended = invoke(*ARGUMENTS, "4", "--context-lens", lens, "--output", str(tmp_path))
    assert ended.exit_code == 0, ended.output
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["settings"]["tasks"] == ["fwe"]
    assert len(report["results"]) == 4
    for row in report["results"]:
        label = "none" if row["policy"] is None else f"{row['method']}-{row['policy']}"
        path = tmp_path / "ruler" / label / str(row["context_len"]) / "fwe.jsonl"
        assert row["score_fwe"] == row["score"] == pytest.approx(upstream_score(path), abs=0.01)
        for index, line in enumerate(map(json.loads, path.read_text().splitlines())):
            assert line["index"] == index
            assert len(line["outputs"]) == 3
            assert set(line["outputs"]) <= set(line["input"].split())
            assert row["context_len"] - 60 < line["length"] <= row["context_len"]
    assert (tmp_path / "tasks.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "fwe (string_match_all in %, 4 samples a length)" in ended.stdout
    assert "85 % of the score at 256 tokens" in ended.stdout


def row_of(variant: Variant, context_len: int, right: int) -> Any:
    """A row in which `right` of 100 samples are right."""
    sample = Sample("vt", 0, Draft("", "", ("a",)), (), 1, 1)
    answered = [Answered(sample, SampleScore(0, float(at < right), "")) for at in range(100)]
    return LengthRow(variant, context_len, 1.0, {}, {"vt": tuple(answered)})


def test_the_effective_length_is_the_longest_at_85_percent_of_the_score_at_l() -> None:
    """The base is the untouched table's score at L, if it is measured."""
    none, yarn = Variant("none", None), Variant("yarn", "fixed")
    scores = {none: (95, 80, 10, 0), yarn: (70, 68, 69, 67)}
    lens = (128, 256, 512, 1024)

    def report_of(*variants: Variant) -> LengthReport:
        plan = LengthPlan(
            native_len=256,
            carries_scaling=False,
            context_lens=lens,
            variants=variants,
            num_windows=0,
            target_tokens=0,
            num_queries=0,
            forms=(),
            depths=(),
            seed=0,
            suggested_lens=(),
            tasks=("vt",),
            num_samples=100,
        )
        rows = tuple(
            row_of(variant, context_len, right)
            for variant in variants
            for context_len, right in zip(lens, scores[variant], strict=True)
        )
        return LengthReport("m", "d", "float32", "cpu", "generated", 0, "", plan, rows)

    both = report_of(none, yarn)
    assert both.effective_len(none) == 256
    assert both.effective_len(yarn) == 512  # 68 = 0.85 * 80 passes, and 67 does not
    assert "yarn fixed  512 tokens (at least 68.0 %)" in table(both)
    assert report_of(yarn).effective_len(yarn) == 1024

    def report_at(context_len: int, *scores: int) -> LengthReport:
        plan = replace(both.plan, context_lens=(context_len,))
        rows = (row_of(none, context_len, scores[0]), row_of(yarn, context_len, scores[1]))
        return replace(both, plan=plan, rows=rows)

    assert "- (--context-lens has no 256)" in table(report_at(512, 9, 9))
    zero = report_at(256, 0, 9)
    assert zero.effective_len(yarn) is None
    assert "yarn fixed  none (the score at 256 tokens is 0)" in table(zero)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--tasks", "qa_3"), "--tasks must be of niah_single_1, "),
        (("ruler", "--queries", "8"), "--queries is an option of `ropewalk eval lengths`"),
        (
            ("--tasks", "vt", "--windows", "8"),
            "of `ropewalk eval lengths` and `ropewalk eval policies`",
        ),
        (("--policies", "--tasks", "vt"), "--tasks is an option of `ropewalk eval ruler`"),
        (("--samples", "8"), "--samples is an option of `ropewalk eval ruler`"),
        (("--tasks", "vt", "--text", __file__), "--text has no meaning for --tasks vt: only niah_"),
    ],
)
def test_options_without_effect_are_refused(arguments: tuple[str, ...], error: str) -> None:
    """Each error names the option."""
    ended = invoke(*arguments)
    assert ended.exit_code == 2
    assert error in ended.output
