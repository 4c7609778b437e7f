"""`ropewalk eval --tasks qa_1,qa_2` on the embedded model: files, scores, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import AutoTokenizer

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.studies.evaluation.command import evaluate
from tests.studies.ruler.qa_data import hotpotqa, squad, written


def invoke(*arguments: str) -> Result:
    """Run the command in this process."""
    ended = CliRunner().invoke(evaluate, arguments)
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    return ended


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of predictions."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.costly
def test_a_run_has_both_tasks_beside_the_others(tmp_path: Path) -> None:
    """Numbers are those of RULER's rule over the files, and positions those of its expression."""
    content = squad(12)
    for article in content["data"]:
        for each in article["paragraphs"]:
            # Any answer with this letter is right, although no answer has the other reference.
            each["qas"][0]["answers"] = [{"text": "E"}, {"text": "zzqx"}]
    names = [written(tmp_path / "s.json", content), written(tmp_path / "h.json", hotpotqa(60))]
    ended = invoke(
        *("--tasks", "qa_2,niah_single_1,qa_1", "--methods", "none,yarn", "--samples", "3"),
        *("--rope-policies", "grow", "--context-lens", "256,512"),
        *("--squad", str(names[0]), "--hotpotqa", str(names[1]), "--output", str(tmp_path / "out")),
    )
    assert ended.exit_code == 0, ended.output
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["settings"]["tasks"] == ["niah_single_1", "qa_1", "qa_2"]
    assert report["text"] == (
        f"generated; {names[0]} (48 questions, 48 documents); "
        f"{names[1]} (60 questions, 121 documents)"
    )
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    for row in report["results"]:
        label = "none" if row["policy"] is None else f"{row['method']}-{row['policy']}"
        folder = tmp_path / "out" / "ruler" / label / str(row["context_len"])
        for task in ("qa_1", "qa_2"):
            lines = lines_of(folder / f"{task}.jsonl")
            right = [
                any(each.lower() in line["pred"].lower() for each in line["outputs"])
                for line in lines
            ]
            assert row[f"score_{task}"] == pytest.approx(100 * sum(right) / 3)
            assert [line["score"] for line in lines] == [100.0 * each for each in right]
            for line in lines:
                assert row["context_len"] - 130 < line["length"] <= row["context_len"]
                assert line["length_w_model_temp"] == line["length"]
                assert "token_position_answer" not in line
                assert line["answer_prefix"] == " Answer:"
        for line in lines_of(folder / "niah_single_1.jsonl"):
            before = line["input"][: line["input"].find(line["outputs"][0])]
            assert line["token_position_answer"] == len(tokenizer.tokenize(before))
        scores = [row[f"score_{task}"] for task in report["settings"]["tasks"]]
        assert row["score"] == pytest.approx(sum(scores) / 3)
    assert max(row["score_qa_1"] for row in report["results"]) > 0
    assert (tmp_path / "out" / "tasks.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "niah_single_1 (string_match_all in %, 3 samples a length)" in ended.stdout
    assert "qa_1 (string_match_part in %, 3 samples a length)" in ended.stdout
    assert "85 % of the score at 256 tokens" in ended.stdout


SQUAD = squad(1)
NO_ANSWERS = {
    "data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": []}]}]}]
}


@pytest.mark.parametrize(
    ("task", "content", "error"),
    [
        ("qa_1", None, "--squad: cannot read PATH: No such file or directory"),
        ("qa_1", "{", "--squad: PATH is not SQuAD's JSON: Invalid JSON: EOF while parsing"),
        (
            "qa_1",
            {"data": [*SQUAD["data"], {"paragraphs": [{"context": 5, "qas": []}]}]},
            "PATH is not SQuAD's JSON: data.4.paragraphs.0.context: Input should be a valid string",
        ),
        ("qa_1", NO_ANSWERS, "--squad: PATH has no question with an answer"),
        ("qa_1", SQUAD, "--samples must be <= 4, so many questions with an answer has PATH"),
        ("qa_2", SQUAD, "--hotpotqa: PATH is not HotpotQA's JSON: Input should be a valid array"),
        (
            "qa_2",
            [{**each, "context": []} for each in hotpotqa()],
            "PATH is not HotpotQA's JSON: 0.context: List should have at least 1 item",
        ),
    ],
)
def test_a_file_that_cannot_serve_is_refused(
    task: str, content: Any, error: str, tmp_path: Path
) -> None:
    """The line names the option, the path and the reason, before the model is loaded."""
    path = tmp_path / "qa.json"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        written(path, content)
    flag = {"qa_1": "--squad", "qa_2": "--hotpotqa"}[task]
    ended = invoke("--tasks", task, flag, str(path), "--output", str(tmp_path / "out"))
    assert ended.exit_code == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ropewalk eval: ")
    assert error in line.replace(str(path), "PATH")
    assert flag in line


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--tasks", "qa_1"), "--tasks qa_1 needs --squad with the path of its questions' file"),
        (
            ("--tasks", "vt,fwe", "--squad", "a.json"),
            "--squad has no meaning for --tasks vt,fwe: only qa_1 reads a.json",
        ),
        (("--hotpotqa", __file__), "--hotpotqa is an option of `ropewalk eval ruler`"),
        (("--policies", "--squad", __file__), "--squad is an option of `ropewalk eval ruler`"),
    ],
)
def test_a_task_without_its_file_and_a_file_without_its_task_are_refused(
    arguments: tuple[str, ...], error: str
) -> None:
    """Each error names the option."""
    ended = invoke(*arguments)
    assert ended.exit_code == 2
    assert error in ended.output
