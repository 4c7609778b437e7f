"""`ropewalk eval` on the embedded model: its numbers, its files, and how it resumes."""

import json
import math
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.planning.planned_deployments import plan_deployments
from ropewalk.studies.evaluation import run as run_module
from ropewalk.studies.evaluation.command import evaluate
from ropewalk.studies.evaluation.plan import LengthOptions, make_plan
from ropewalk.studies.evaluation.subject import native_of
from ropewalk.studies.evaluation.texts import choose_windows, make_texts, read_documents

ARGUMENTS = (
    "--methods", "none,yarn", "--windows", "2", "--queries", "8",
    "--context-lens", "128", "--suggest", "256,1024", "--rope-policies", "fixed,by_position,grow",
)  # fmt: skip


def invoke(*arguments: str) -> Result:
    """Run the command in this process."""
    ended = CliRunner().invoke(evaluate, arguments)
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    return ended


@dataclass(frozen=True)
class Run:
    """One run and its files."""

    ended: Result
    folder: Path
    report: dict[str, Any]

    def row(self, method: str, policy: str | None, context_len: int) -> dict[str, Any]:
        """One entry of its results."""
        for each in self.report["results"]:
            if (each["method"], each["policy"], each["context_len"]) == (
                method,
                policy,
                context_len,
            ):
                found: dict[str, Any] = each
                return found
        raise AssertionError((method, policy, context_len))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of four variants at three lengths."""
    folder = tmp_path_factory.mktemp("eval")
    ended = invoke(*ARGUMENTS, "--output", str(folder))
    assert ended.exit_code == 0, ended.output
    return Run(ended, folder, json.loads((folder / "results.json").read_text()))


def plan_of(*arguments: str) -> Any:
    """The plan of a command line: its windows, queries and cells."""
    settings = load_settings({})
    params = evaluate.make_context("eval", [*arguments]).params
    names = [each.name for each in fields(LengthOptions) if each.name in params]
    options = LengthOptions(**{name: params[name] for name in names})
    return make_plan(options, native_of(settings))


@pytest.mark.parametrize(
    ("variant", "context_len", "factor"),
    [
        (("none", None), 1024, None),
        (("yarn", "grow"), 1024, 4.0),
        (("yarn", "fixed"), 128, 4.0),
        (("yarn", "by_position"), 256, None),
    ],
)
def test_perplexity_is_that_of_transformers(
    measured: Run,
    embedded: Checkpoint,
    variant: tuple[str, str | None],
    context_len: int,
    factor: float | None,
) -> None:
    """The reference is a plain float32 forward with the same rope_parameters per window."""
    options = {}
    if factor is not None:
        options["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": factor,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 256,
        }
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32, **options)
    plan = plan_of(*ARGUMENTS)
    texts = make_texts(read_documents(()), embedded.tokenizer, plan.longest)
    windows = choose_windows(texts, plan, embedded.tokenizer)
    row = measured.row(*variant, context_len)
    assert len(windows) == len(row["windows"]) == 2
    total = 0.0
    for window, found in zip(windows, row["windows"], strict=True):
        source = next(each for each in texts.sources if each.name == window.source)
        text_ids = source.token_ids[: window.end][-(context_len - 1) :]
        ids = torch.tensor([[0, *text_ids]])  # 0: the beginning of every text
        assert ids.shape == (1, context_len)
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[-plan.target_tokens :, 0]
        nats = -float(chosen.sum())
        total += nats
        assert found["target_tokens"] == plan.target_tokens
        target = embedded.tokenizer.decode(list(text_ids[-plan.target_tokens :]))
        assert found["target_bytes"] == len(target.encode())
        assert found["nats"] == pytest.approx(nats, rel=1e-3)
    assert row["perplexity"] == pytest.approx(math.exp(total / row["target_tokens"]), rel=1e-3)
    bits = total / math.log(2) / row["target_bytes"]
    assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-3)


def test_equal_tables_have_equal_numbers_and_are_measured_once(measured: Run) -> None:
    """Only fixed differs from the untouched model up to L, and grow is fixed at the longest."""
    for name in ("perplexity", "retrieval", "queries"):
        for context_len in (128, 256):
            untouched = measured.row("none", None, context_len)[name]
            for policy in ("by_position", "grow"):
                assert measured.row("yarn", policy, context_len)[name] == untouched
        static = measured.row("yarn", "fixed", 1024)[name]
        assert measured.row("yarn", "grow", 1024)[name] == static
    # none 3, fixed 3, by_position 1 at 1,024 tokens; grow has none of its own
    lines = (measured.folder / "results.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (3 + 3 + 1)


def test_the_model_finds_needles_where_yarn_carries_it(measured: Run) -> None:
    """The untouched table fails at four times its length."""
    assert measured.row("none", None, 256)["retrieval"] > 0.5
    for policy in ("fixed", "by_position", "grow"):
        assert measured.row("yarn", policy, 1024)["retrieval"] > 0.5
    assert measured.row("none", None, 1024)["retrieval"] < 0.2


def test_a_second_run_measures_only_what_is_missing(
    measured: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell is lost, and another was cut while it was written."""
    folder = tmp_path / "eval"
    shutil.copytree(measured.folder, folder)
    record = folder / "results.jsonl"
    lines = record.read_text().splitlines()
    record.write_text("\n".join([*lines[:4], *lines[5:-1], lines[-1][:50]]))
    again = []
    own = run_module.measure

    def measure(engine: Any, cell: Any, progress: Any) -> Any:
        again.append((cell.kind, cell.context_len))
        return own(engine, cell, progress)

    monkeypatch.setattr(run_module, "measure", measure)
    ended = invoke(*ARGUMENTS, "--output", str(folder))
    assert ended.exit_code == 0, ended.output
    lost = [json.loads(lines[at]) for at in (4, -1)]
    assert again == [(each["kind"], each["context_len"]) for each in lost]
    assert f"{len(lines) - 2} of {len(lines)} cells are those of results.jsonl" in ended.stderr
    assert (folder / "results.csv").read_text() == (measured.folder / "results.csv").read_text()
    again.clear()
    # Another seed is another measurement, and both stay in the file.
    other = ["--methods", "none", "--windows", "1", "--queries", "0", "--context-lens", "128"]
    other += ["--text", __file__]  # the library has to be read and tokenised
    assert invoke(*other, "--seed", "1", "--output", str(folder)).exit_code == 0
    assert len(again) == 1
    assert len(record.read_text().splitlines()) == len(lines) + 1
    assert invoke(*other, "--seed", "1", "--output", str(folder)).exit_code == 0
    assert len(again) == 1
    assert invoke(*other, "--seed", "1", "--no-resume", "--output", str(folder)).exit_code == 0
    assert len(again) == 2
    # So is a cache in few bits, whose format the table and the numbers tell.
    assert invoke(*other, "--seed", "1", "--output", str(folder)).exit_code == 0
    assert len(again) == 2
    monkeypatch.setenv("ROPEWALK_KV_CACHE_DTYPE", "int4")
    ended = invoke(*other, "--seed", "1", "--output", str(folder))
    assert ended.exit_code == 0, ended.output
    assert len(again) == 3
    assert "float32 on cpu, KV cache in int4, trained for" in ended.stdout
    assert json.loads((folder / "results.json").read_text())["kv_cache_dtype"] == "int4"


def test_the_suggestion_is_a_file_that_serves(measured: Run) -> None:
    """The file is the printed one: YaRN by position, for a length within L and one beyond."""
    path = measured.folder / "suggestion.yaml"
    assert path.read_text() in measured.ended.stdout
    settings = load_settings({"config": str(path)})
    native = native_of(settings)
    (deployment,) = plan_deployments(settings, native)
    assert (deployment.rope_type, deployment.policy) == ("yarn", "by_position")
    assert [tier.ceiling for tier in deployment.own_tiers] == [256, 512, 1024]
    assert "is served up to 256 tokens only" in path.read_text()
