"""`ropewalk eval --prefixes`, which reads a text once, and `--native-len`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.planning.planned_deployments import plan_deployments
from ropewalk.studies.evaluation import run as run_module
from ropewalk.studies.evaluation.cells import PERPLEXITY
from ropewalk.studies.evaluation.plan import LengthPlan, Variant
from ropewalk.studies.evaluation.subject import load_subject
from ropewalk.studies.evaluation.texts import (
    LengthText,
    Texts,
    choose_texts,
    make_texts,
    read_documents,
)
from tests.studies.evaluation.test_evaluation import invoke, plan_of

LENS = (128, 256, 512, 1024)
ARGUMENTS = (
    "--prefixes", "--methods", "none,yarn", "--rope-policies", "fixed,by_position,grow",
    "--windows", "2", "--queries", "0", "--context-lens", ",".join(map(str, LENS)),
)  # fmt: skip


class Run:
    """A finished run: its report, and the cells that it sent to the engine."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        own, self.cells = run_module.measure, list[Any]()

        def measure(engine: Engine, cell: Any, progress: Any) -> Any:
            self.cells.append(cell)
            return own(engine, cell, progress)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_module, "measure", measure)
            self.ended = invoke(*arguments, "--output", str(folder))
        assert self.ended.exit_code == 0, self.ended.output
        self.folder = folder
        self.report: dict[str, Any] = json.loads((folder / "results.json").read_text())

    def row(self, variant: Variant, context_len: int) -> dict[str, Any]:
        """One entry of its results."""
        wanted = (variant.method, variant.policy, context_len)
        found: dict[str, Any] = next(
            each
            for each in self.report["results"]
            if (each["method"], each["policy"], each["context_len"]) == wanted
        )
        return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of four variants at four lengths of two texts."""
    return Run(tmp_path_factory.mktemp("prefixes"), *ARGUMENTS)


def prompts_of(plan: LengthPlan, texts: Texts) -> list[tuple[int, ...]]:
    """The prompts of the longest length, special tokens included."""
    return [(*texts.special_ids, *each.token_ids) for each in choose_texts(texts, plan)]


def windows_before(plan: LengthPlan, context_len: int) -> list[slice]:
    """The target tokens before a length: windows side by side, of which the last one ends there."""
    num_windows, size = plan.windows_at(context_len), plan.target_tokens
    first = context_len - num_windows * size
    return [slice(at, at + size) for at in range(first, context_len, size)]


def test_a_length_has_the_numbers_of_a_request_of_its_own(measured: Run) -> None:
    """Each window has the bits of a request of exactly its prefix, under every variant.

    By position shares nothing wrongly: its prefixes are read under their own tables.
    """
    plan = plan_of(*ARGUMENTS)
    subject = load_subject(load_settings({}), plan)
    texts = make_texts(read_documents(()), subject.tokenizer, plan.longest)
    engine = subject.make_engine()
    engine.start()
    try:
        for variant, deployment in subject.deployments.items():
            asked = RopeRequest(rope_type="default" if variant.policy is None else None)
            for context_len in LENS:
                tier_choice = deployment.choose(asked, context_len, 0)
                sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
                expected = []
                for number, prompt in enumerate(prompts_of(plan, texts)):
                    request = Request(f"{number}", prompt[:context_len], sampling, tier_choice)
                    (outputs,) = engine.generate([request])
                    entries = [each for output in outputs for each in output.prompt_logprobs]
                    assert entries[0] is None
                    expected += [
                        -math.fsum(each.logprob for each in entries[window] if each is not None)
                        for window in windows_before(plan, context_len)
                    ]
                row = measured.row(variant, context_len)
                assert [each["nats"] for each in row["windows"]] == expected
                total = row["target_tokens"]
                assert total == plan.target_tokens * len(expected)
                assert row["perplexity"] == pytest.approx(math.exp(math.fsum(expected) / total))
    finally:
        engine.stop()


def test_a_request_measures_all_lengths_that_it_reads_alike(measured: Run) -> None:
    """Within L, every policy but fixed is the untouched table, and grow ends as fixed."""
    found = []
    for cell in measured.cells:
        assert cell.kind == PERPLEXITY
        assert len(cell.tasks) == 2, "one request a text"
        (ends,) = {task.of.ends for task in cell.tasks}
        assert {len(task.prompt_ids) for task in cell.tasks} == {ends[-1]}
        found.append((ends, cell.tier_choice.policy, cell.tier_choice.tier.factor))
    assert sorted(found) == [
        ((128, 256, 512, 1024), "fixed", 4),
        ((128, 256, 512, 1024), "grow", 1),  # the untouched table, which is asked for by name
        ((512,), "grow", 2),
        ((512, 1024), "by_position", 4),
    ]
    none = Variant("none", None)
    for context_len in (128, 256):
        for policy in ("by_position", "grow"):
            row = measured.row(Variant("yarn", policy), context_len)
            assert row["windows"] == measured.row(none, context_len)["windows"]
    fixed, grow = (measured.row(Variant("yarn", each), 1024) for each in ("fixed", "grow"))
    assert grow["windows"] == fixed["windows"]
    assert measured.row(Variant("yarn", "by_position"), 1024)["windows"] != fixed["windows"]


@pytest.mark.parametrize(("policy", "factor"), [(None, 1.0), ("fixed", 4.0)])
def test_perplexity_is_that_of_transformers(
    measured: Run, embedded: Checkpoint, policy: str | None, factor: float
) -> None:
    """The reference is a plain float32 forward of the prefix."""
    options = {}
    if factor > 1:
        options["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": factor,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 256,
        }
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32, **options)
    plan = plan_of(*ARGUMENTS)
    texts = make_texts(read_documents(()), embedded.tokenizer, plan.longest)
    for context_len in (128, 512):
        nats, num_bytes = [], []
        for prompt in prompts_of(plan, texts):
            ids = torch.tensor([prompt[:context_len]])
            with torch.no_grad():
                logprobs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            for window in windows_before(plan, context_len):
                nats.append(-float(chosen[window.start - 1 : window.stop - 1].sum()))
                text = embedded.tokenizer.decode(list(prompt[window]))
                num_bytes.append(len(text.encode()))
        row = measured.row(Variant("none" if policy is None else "yarn", policy), context_len)
        assert [each["nats"] for each in row["windows"]] == pytest.approx(nats, rel=1e-3)
        assert [each["target_bytes"] for each in row["windows"]] == num_bytes


def test_windows_lie_side_by_side_before_each_length() -> None:
    """There are eight, or as many as fill half of a shorter length."""
    plan = plan_of(*ARGUMENTS)
    assert plan.target_tokens == 64
    assert [plan.windows_at(each) for each in LENS] == [1, 2, 4, 8]
    counts = tuple(map(plan.windows_at, LENS))
    text = LengthText("a", LENS, counts, plan.target_tokens, (0, *[2] * 1023))
    for at, context_len in enumerate(LENS):
        spans = [(begin, end) for begin, end, _ in text.windows(at)]
        assert spans == [(each.start, each.stop) for each in windows_before(plan, context_len)]
        assert [num_bytes for *_, num_bytes in text.windows(at)] == [128] * len(spans)
    assert text.first_target == 64


def test_more_texts_than_there_are_are_refused(tmp_path: Path, embedded: Checkpoint) -> None:
    """The refusal has the number of disjoint texts of the longest length."""
    path = tmp_path / "a.txt"
    path.write_text("value = 1\n" * 2000)
    ended = invoke(*ARGUMENTS, "--windows", "99", "--text", str(path), "--output", str(tmp_path))
    assert ended.exit_code == 2
    line = ended.stderr.splitlines()[-1]  # behind those of the load
    (source,) = make_texts(read_documents((path,)), embedded.tokenizer, 1024).sources
    most = len(source.token_ids) // 1023  # and the special token before them
    assert line == (
        f"ropewalk: --windows must be <= {most}, so many texts of 1024 tokens there are; got 99"
    )


def test_a_stated_length_is_where_tiers_begin(tmp_path: Path, embedded: Checkpoint) -> None:
    """The model is measured as one that was trained for 128 tokens."""
    run = Run(
        tmp_path, "--native-len", "128", "--methods", "none,yarn", "--windows", "2",
        "--queries", "0", "--context-lens", "64,128", "--suggest", "256",
    )  # fmt: skip
    assert run.report["native_len"] == 128
    factors = {
        (each["policy"], each["context_len"]): each["factor"] for each in run.report["results"]
    }
    for context_len, own in ((64, 1), (128, 1), (256, 2)):
        assert factors[None, context_len] == 1
        assert factors["fixed", context_len] == 2
        assert factors["by_position", context_len] == own
    (by_position,) = (each.tier_choice for each in run.cells if each.tier_choice.lower_tiers)
    assert [tier.ceiling for tier in by_position.prompt_tiers] == [128, 256]
    settings = load_settings({"config": str(tmp_path / "suggestion.yaml")})
    (deployment,) = plan_deployments(settings, embedded.native)
    assert [tier.ceiling for tier in deployment.own_tiers][-1] == 256


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--native-len", "512"),
            "--native-len must be <= what the checkpoint was trained for (256), got 512",
        ),
        (
            ("--native-len", "128", "--methods", "none,rerope"),
            "--native-len 128 needs a checkpoint without scaling, and methods without positions",
        ),
    ],
)
def test_a_length_or_prefixes_that_mean_nothing_are_refused(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    """The command ends before any measurement."""
    ended = invoke(*arguments, "--output", str(tmp_path))
    assert ended.exit_code == 2
    assert sentence in ended.stderr
    assert not (tmp_path / "results.jsonl").exists()
