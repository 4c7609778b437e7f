"""The benchmark of whole models, at sizes that a CPU runs in seconds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from benchmarks import gpu_model
from benchmarks.gpu_engine import Served, Step
from benchmarks.gpu_model_inputs import (
    LLAMA_3_8B,
    TINY,
    random_model,
    taken_over,
    twin,
)
from benchmarks.gpu_model_parts import PARTS
from benchmarks.gpu_model_report import report
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


@pytest.mark.costly
def test_a_run_measures_every_part_and_reports_it(tmp_path: Path) -> None:
    """Servers and contenders are processes of their own, so they are left out here."""
    apart = {"server", "contenders"}
    rows, text = run(tmp_path, "--parts", ",".join(name for name in PARTS if name not in apart))
    by_part: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    measured = ("prefill", "first_token", "burst", "arrivals", "sampling", "windows")
    assert set(by_part) >= {*measured, "profile"}
    decodes = {(row["sequences"], row["who"]): row for row in by_part["decode"]}
    ours = decodes[3, "ropewalk"]
    assert ours["tokens_s"] == pytest.approx(3 * TINY.output_len / ours["seconds"])
    assert 0 < ours["device_s"] < ours["step_s"] < ours["seconds"]
    assert ours["host_s"] == pytest.approx(ours["step_s"] - ours["device_s"])
    (growth,) = by_part["growth"]
    assert growth["ceiling"] == 128
    for row in by_part["drafts"]:
        assert row["accepted"] > 0.5
        assert row["equal"] == 1.0  # on a CPU
    assert {row["what"] for row in by_part["left_out"]} == {"generate, compiled", "memory"}
    assert "commit `abc123`" in text
    assert (tmp_path / "gpu_first_token.png").stat().st_size > 1000


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


def test_only_pure_steps_count_as_decoding() -> None:
    """A pure step has all sequences, no first token and no crossing."""
    steps = (Step(9.0, 2, 2, 0), Step(1.0, 2, 0, 0), Step(5.0, 2, 0, 1), Step(7.0, 1, 0, 0))
    served = Served(22.0, 9.0, steps, ((1, 2, 3), (4, 5, 6, 7, 8, 9)))
    assert served.decode_tokens_s == 7 / 13
    assert served.decode_s(2) == [1.0]
    assert served.crossing_s() == 5.0


def test_ratios_are_of_the_same_round() -> None:
    """The result is the median of the ratios, not the ratio of the medians."""
    rows: list[dict[str, Any]] = [{"part": "machine", **dict.fromkeys(MACHINE, "x")}]
    for number, (ours, theirs) in enumerate(((100.0, 50.0), (10.0, 2.0), (30.0, 10.0))):
        for who, rate in (("ropewalk", ours), ("continuous", theirs)):
            row = {"part": "decode", "sequences": 64, "round": number, "who": who}
            rows.append({**row, "seconds": 1.0, "tokens_s": rate})
    assert "| 64 | continuous | 2 | 6 | 4.00 |" in report(rows, [])
