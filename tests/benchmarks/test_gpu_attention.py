"""The GPU's benchmark at sizes that Triton's interpreter can run."""

import json
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from benchmarks import gpu_attention
from benchmarks.gpu_clock import matrix_rates, seconds
from benchmarks.gpu_inputs import LLAMA_3_8B, PAGE_SIZE, TINY, Cache
from ropewalk.model_runtime.config import EngineConfig

CPU = torch.device("cpu")


def test_a_run_measures_every_part_and_prints_it(tmp_path: Path) -> None:
    """The rows are JSON lines on disk and tables on standard output."""
    path = tmp_path / "gpu.jsonl"
    arguments = ["--tiny", "--record", str(path), "--commit", "abc123"]
    ended = CliRunner().invoke(gpu_attention.main, arguments, catch_exceptions=False)
    assert ended.exit_code == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    parts = [row["part"] for row in rows]
    decodes = ["decode"] * (len(TINY.decodes) + len(TINY.mixed))
    prefills = ["prefill"] * 2 * len(TINY.prompts)
    assert parts == ["machine", "ceilings", "angles", "error", *decodes, *prefills]
    told = {row["part"]: row for row in rows}
    by_batch = {row["batch"]: row for row in rows if row["part"] == "decode"}
    assert by_batch["2 x 130"]["bytes"] == 130 * 2 * 2 * 2 * 16 * 4
    assert by_batch["1 x 300 + 2 x 20"]["bytes"] == (300 + 2 * 20) * 2 * 2 * 16 * 4
    assert all(row["first_s"] > 0 for row in rows if row["part"] in {"decode", "prefill"})
    assert told["ceilings"].keys() >= {"read_bytes_s", "sustained_flop_s"}
    assert told["angles"]["cosine_error"] < 1e-6 < told["angles"]["transformers_cosine_error"]
    assert "commit `abc123`" in ended.stdout
    assert ended.stdout.count("| 2 x 130 |") == 1


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is compared with the reference before any timing."""

    def wrong(self: object, read: object) -> torch.Tensor:
        del self
        return 1.1 * torch.ones_like(read.query_THD)  # type: ignore[attr-defined]

    monkeypatch.setattr(gpu_attention.TritonAttention, "read", wrong)
    with pytest.raises(ValueError, match="decode differs by"):
        list(gpu_attention.measure(TINY, CPU, "abc123"))


def test_no_page_is_read_twice() -> None:
    """A measurement reads more bytes than a processor's cache holds."""
    cache = Cache(TINY, CPU)
    for sequences in (*((each,) for each in TINY.decodes), *TINY.mixed):
        batches = cache.decode_batches(sequences)
        pages = [
            page
            for batch in batches
            for place, row in zip(batch.places_S, batch.page_table_SN.tolist(), strict=True)
            for page in row[: place.first_position // PAGE_SIZE + 1]
        ]
        assert len(pages) == len(set(pages))
        assert len(pages) * PAGE_SIZE * TINY.token_bytes >= TINY.least_bytes


def test_the_sizes_are_those_of_the_roofline() -> None:
    """The sizes are 4k, 32k and 128k with 1, 8 and 64 sequences, and 512k with 1 and 8."""
    asked = {(k * 1024, count) for k in (4, 32, 128) for count in (1, 8, 64)}
    assert set(LLAMA_3_8B.decodes) == asked | {(512 * 1024, 1), (512 * 1024, 8)}
    assert LLAMA_3_8B.token_bytes == 4096


def test_a_batch_is_as_uneven_as_it_says() -> None:
    """One long context beside short ones, as on a busy server."""
    (batch, *_) = Cache(TINY, CPU).decode_batches(((300, 1), (20, 2)))
    assert [place.first_position + 1 for place in batch.places_S] == [300, 20, 20]
    assert ((131_072, 1), (1024, 31)) in LLAMA_3_8B.mixed
    assert ((131_072, 8), (1024, 7)) in LLAMA_3_8B.mixed


def test_pages_are_those_of_a_server() -> None:
    """A page is larger or smaller than served ones only if a setting says so."""
    assert EngineConfig(kv_cache_tokens=64, max_model_len=64).page_size == PAGE_SIZE


def test_unknown_parts_of_a_layer_are_refused() -> None:
    """Unknown parts are refused before any measurement."""
    ended = CliRunner().invoke(gpu_attention.main, ["--tiny", "--parts", "decode,walk"])
    assert ended.exit_code == 2
    assert "walk is none of decode, prefill, tuning" in ended.stderr


def test_products_fill_the_time_that_they_are_given() -> None:
    """The sustained rate is over all products, and the burst's is of single ones."""
    begin = time.perf_counter()
    rates = matrix_rates(CPU, 64, 3, warm_s=0.0, sustained_s=0.05)
    assert time.perf_counter() - begin > 0.05
    assert rates.burst > 0
    assert rates.sustained > 0


def test_time_is_of_one_work() -> None:
    """Two functions are timed, and the result is seconds of one call."""
    calls = []
    took = seconds(CPU, [lambda: calls.append(1), lambda: calls.append(2)], 3)
    assert calls == [1, 2] * 3
    assert 0 < took < 1
