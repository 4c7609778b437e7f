"""The benchmark of whole models, at sizes that a CPU runs in seconds."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from benchmarks import gpu_model
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_engine import Served, Step
from benchmarks.gpu_model_inputs import (
    LLAMA_3_8B,
    TINY,
    Prompts,
    random_model,
    taken_over,
    twin,
)
from benchmarks.gpu_model_parts import PARTS
from benchmarks.gpu_model_report import draw, report
from benchmarks.make_model import llama_config

CPU = torch.device("cpu")
MACHINE = ("date", "commit", "device", "torch", "triton", "transformers", "python")


def run(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Run the benchmark; returns the rows and the report on disk."""
    ended = CliRunner().invoke(
        gpu_model.main,
        ["--tiny", "--out", str(folder), "--commit", "abc123", *arguments],
        catch_exceptions=False,
    )
    assert ended.exit_code == 0, ended.stderr
    text = (folder / "gpu_model.md").read_text()
    assert text in ended.stdout
    lines = (folder / "gpu_model.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], text


def test_a_run_measures_every_part_and_reports_it(tmp_path: Path) -> None:
    """The server has a test of its own; parts that a CPU cannot run are listed with a reason."""
    apart = {"server", "contenders"}
    rows, text = run(tmp_path, "--parts", ",".join(name for name in PARTS if name not in apart))
    by_part: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    decodes = {(row["sequences"], row["who"]): row for row in by_part["decode"]}
    both = ("ropewalk", "ropewalk, not recorded")
    assert {(batch, who) for batch in (1, 3) for who in both} == set(decodes)
    ours = decodes[3, "ropewalk"]
    assert ours["tokens_s"] == pytest.approx(3 * TINY.output_len / ours["seconds"])
    assert 0 < ours["device_s"] < ours["step_s"] < ours["seconds"]
    assert ours["host_s"] == pytest.approx(ours["step_s"] - ours["device_s"])
    assert {"schedule", "build", "forward", "sample"} <= set(ours["parts_s"])
    assert {row["chunk"] for row in by_part["prefill"]} == set(TINY.chunk_lens)
    assert {row["context"] for row in by_part["first_token"]} == set(TINY.contexts)
    (growth,) = by_part["growth"]
    assert growth["ceiling"] == 128
    assert growth["crossing_s"] > 0
    rotation = {(row["context"], row["sequences"], row["kind"]) for row in by_part["rotation"]}
    assert rotation == {(*size, kind) for size in TINY.steps for kind in ("read", "write", "none")}
    assert all(row["prompts"] == 3 and row["seconds"] > 0 for row in by_part["burst"])
    assert by_part["arrivals"][0]["requests"] == TINY.arrivals[0]
    settings = {row["setting"] for row in by_part["sampling"]}
    assert settings >= {"greedy", "temperature 1, top_p 0.9", "a grammar"}
    drafts = {row["sequences"]: row for row in by_part["drafts"]}
    assert set(drafts) == set(TINY.drafted)
    for row in drafts.values():
        assert row["plain_tokens_s"] > 0 < row["drafted_tokens_s"]
        assert row["accepted"] > 0.5
        assert row["equal"] == 1.0  # on a CPU
    assert {row["context"] for row in by_part["windows"]} == {size[0] for size in TINY.steps}
    for row in by_part["profile"]:
        assert "Self CPU" in (tmp_path / row["file"]).read_text()
    left_out = {row["what"] for row in by_part["left_out"]}
    assert left_out == {"generate, compiled", "memory"}
    for needed in (
        "commit `abc123`",
        "### A tier change",
        "### Settings of sampling",
        "### Drafts",
    ):
        assert needed in text
    assert (tmp_path / "gpu_first_token.png").stat().st_size > 1000


@pytest.mark.long
def test_contenders_run_in_processes_of_their_own(tmp_path: Path) -> None:
    """If transformers' batching does not run on a CPU, the report lists it as left out."""
    rows, text = run(tmp_path, "--parts", "decode,contenders")
    decodes = {(row["sequences"], row["who"]) for row in rows if row["part"] == "decode"}
    left_out = {row["what"] for row in rows if row["part"] == "left_out"}
    assert {(1, "generate"), (3, "generate")} <= decodes
    for name in ("continuous", "continuous, graphs"):
        assert (3, name) in decodes or f"{name}, 3 at once" in left_out
    assert "| 3 | generate |" in text


def test_a_contender_that_hangs_costs_its_own_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python starts, and is ended before torch is imported."""
    sizes = replace(TINY, contender_s=0.05, contender_batches=(1,))
    bench = Bench(sizes, CPU, 1.0, 1.0, math.inf, tmp_path, is_tiny=True)
    (row,) = PARTS["contenders"](bench)
    assert (row["what"], row["why"]) == ("generate, 1 at once", "it did not end in 0.05 s")


def test_the_first_round_is_reported_apart() -> None:
    """It may compile, so the median leaves it out."""
    rows: list[dict[str, Any]] = [{"part": "machine", **dict.fromkeys(MACHINE, "x")}]
    rows += [
        {"part": "first_token", "context": 1024, "round": number, "seconds": seconds}
        for number, seconds in enumerate((4.0, 0.03, 0.05, 0.04))
    ]
    assert "| 1,024 | 40 | 4000 |" in report(rows, [])


def test_the_server_is_measured_by_its_clients_and_by_its_metrics(tmp_path: Path) -> None:
    """The server is a process of its own, under the load of `ropewalk bench`."""
    rows, text = run(tmp_path, "--parts", "server")
    assert not [row for row in rows if row["part"] == "left_out"]
    clients = [row for row in rows if row["part"] == "server_bench"]
    assert [row["context"] for row in clients] == list(TINY.server.context_lens)
    assert all(row["first_token_p50_s"] > 0 for row in clients)
    told = [row for row in rows if row["part"] == "server_metrics"]
    # A warm-up of one, and two that are measured.
    num_firsts = {row["context_bucket"]: row["first_token_count"] for row in told}
    assert (num_firsts["32"], num_firsts["128"]) == (3, 3)
    num_gaps = sum(row["next_token_count"] for row in told)
    assert num_gaps == 2 * 3 * (TINY.server.output_tokens - 1)
    assert "from /metrics" in text


def test_measurements_without_time_are_named(tmp_path: Path) -> None:
    """A run without time begins no part, and reports each part as left out."""
    rows, text = run(tmp_path, "--seconds", "1e-9")
    assert {row["what"] for row in rows if row["part"] == "left_out"} == set(PARTS)
    assert text.count("no time was left") == len(PARTS)


def test_unknown_parts_are_refused(tmp_path: Path) -> None:
    """Unknown parts are refused before any measurement."""
    ended = CliRunner().invoke(gpu_model.main, ["--out", str(tmp_path), "--parts", "decode,walk"])
    assert ended.exit_code == 2
    assert "walk is none of rotation, decode" in ended.stderr


def test_the_counts_are_those_of_the_model() -> None:
    """The model's parameters give the bytes, and torch's counter gives the operations."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(LLAMA_3_8B.shape, 8192, dtype=torch.bfloat16))
    read = sum(weight.numel() for weight in model.parameters())
    read -= model.model.embed_tokens.weight.numel()
    assert 2 * read == LLAMA_3_8B.step_bytes == pytest.approx(15.01e9, rel=1e-3)

    tiny = random_model(TINY.shape, TINY.native_len, TINY.dtype, CPU)
    tiny.set_attn_implementation("eager")
    counter, num_tokens = FlopCounterMode(display=False), 40
    with counter, torch.no_grad():
        tiny(torch.arange(num_tokens)[None], logits_to_keep=1)
    shape = TINY.shape
    pair = 4 * shape.layers * shape.heads * shape.head_dim
    hidden_pairs = num_tokens * (num_tokens - 1) // 2  # eager attention multiplies them, too
    counted = counter.get_total_flops() - pair * hidden_pairs
    assert counted == TINY.prefill_operations(num_tokens)


def test_a_twin_is_another_model_over_the_same_memory() -> None:
    """The twin is taken over and answers; the other model stays as it was."""
    shape = TINY.shape
    model = random_model(shape, TINY.native_len, TINY.dtype, CPU)
    other = twin(model, shape, TINY.native_len)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(one.data_ptr() == two.data_ptr() for one, two in pairs)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids).logits
        checkpoint = taken_over(other)
        assert checkpoint.report.difference <= checkpoint.report.threshold
        assert torch.equal(model(ids).logits, before)


def test_weights_are_made_in_their_own_dtype() -> None:
    """The seed is fixed, and logits are as spread as a real model's."""
    one, two = (random_model(TINY.shape, TINY.native_len, torch.bfloat16, CPU) for _ in range(2))
    assert {weight.dtype for weight in one.parameters()} == {torch.bfloat16}
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    with torch.no_grad():
        assert 1 < float(one(torch.arange(20)[None]).logits.float().std()) < 4


def test_no_prompt_begins_like_another() -> None:
    """No prefix cache can hold such a prompt."""
    prompts = Prompts(2048)
    starts = {tuple(ids[:8]) for _ in range(5) for ids in prompts.of(20, 10)}
    assert len(starts) == 50


def test_only_pure_steps_count_as_decoding() -> None:
    """A pure step has all sequences, no first token and no crossing."""
    steps = (
        Step(9.0, 2, 2, 0),
        Step(1.0, 2, 0, 0),
        Step(5.0, 2, 0, 1),
        Step(3.0, 2, 0, 0),
        Step(7.0, 1, 0, 0),
    )
    served = Served(25.0, 9.0, steps, ((1, 2, 3), (4, 5, 6, 7, 8, 9)))
    assert served.decode_tokens_s == 7 / 16
    assert served.decode_s(2) == [1.0, 3.0]
    assert served.decode_median_s(2) == 2.0
    assert served.crossing_s() == 5.0
    with pytest.raises(ValueError, match="decoded 3 sequences"):
        served.decode_median_s(3)


def test_ratios_are_of_the_same_round() -> None:
    """The result is the median of the ratios, not the ratio of the medians."""
    machine = dict.fromkeys(("date", "commit", "device", "torch", "triton"), "x")
    rows: list[dict[str, Any]] = [
        {"part": "machine", **machine, "transformers": "x", "python": "x"}
    ]
    for number, (ours, theirs) in enumerate(((100.0, 50.0), (10.0, 2.0), (30.0, 10.0))):
        for who, rate in (("ropewalk", ours), ("continuous", theirs)):
            row = {"part": "decode", "sequences": 64, "round": number, "who": who}
            rows.append({**row, "seconds": 1.0, "tokens_s": rate})
    assert "| 64 | continuous | 2 | 6 | 4.00 |" in report(rows, [])


def test_logarithmic_axes_say_so_and_have_ticks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lengths and times that are close together are labelled, too."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    lens = {1024: 0.021, 4096: 0.028}
    rows: list[dict[str, Any]] = [
        {"part": "first_token", "context": context, "seconds": seconds, "round": 0}
        for context, seconds in lens.items()
    ]
    assert draw(rows, tmp_path) == [tmp_path / "gpu_first_token.png"]
    (axes,) = figures[0].axes
    for axis in (axes.xaxis, axes.yaxis):
        assert axis.get_scale() == "log"
        assert "log scale" in axis.get_label_text()
        assert len([text for text in axis.get_ticklabels() if text.get_text()]) >= 3
