"""The GPU's benchmark at sizes that Triton's interpreter can run."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from benchmarks import gpu_attention
from benchmarks.gpu_clock import seconds
from benchmarks.gpu_inputs import LLAMA_3_8B, PAGE_SIZE, TINY, Cache

CPU = torch.device("cpu")


def test_a_run_measures_every_part_and_prints_it(tmp_path: Path) -> None:
    """The rows are JSON lines on disk and tables on standard output."""
    path = tmp_path / "gpu.jsonl"
    arguments = ["--tiny", "--record", str(path), "--commit", "abc123"]
    ended = CliRunner().invoke(gpu_attention.main, arguments, catch_exceptions=False)
    assert ended.exit_code == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    parts = [row["part"] for row in rows]
    decodes, prefills = ["decode"] * len(TINY.decodes), ["prefill"] * 4
    assert parts == ["machine", "ceilings", "angles", "error", *decodes, *prefills]
    told = {row["part"]: row for row in rows}
    assert told["decode"]["bytes"] == 130 * 2 * 2 * 2 * 16 * 4
    assert told["angles"]["cosine_error"] < 1e-6 < told["angles"]["transformers_cosine_error"]
    assert "commit `abc123`" in ended.stdout
    assert ended.stdout.count("| 130 | 2 |") == 1


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is compared with the reference before any timing."""

    def wrong(self: object, read: object) -> torch.Tensor:
        del self
        return 1.1 * torch.ones_like(read.query_THD)  # type: ignore[attr-defined]

    monkeypatch.setattr(gpu_attention.TritonAttention, "read", wrong)
    with pytest.raises(ValueError, match="decode differs by"):
        list(gpu_attention.measure(TINY, CPU, "abc123", tune=False))


def test_no_page_is_read_twice() -> None:
    """A measurement reads more bytes than a processor's cache holds."""
    cache = Cache(TINY, CPU)
    for context, num_sequences in TINY.decodes:
        batches = cache.decode_batches(context, num_sequences)
        pages = [page for batch in batches for page in batch.page_table_SN.flatten().tolist()]
        assert len(pages) == len(set(pages))
        assert len(pages) * PAGE_SIZE * TINY.token_bytes >= TINY.least_bytes


def test_the_sizes_are_those_of_the_roofline() -> None:
    """The sizes are 4k, 32k and 128k with 1, 8 and 64 sequences, and 512k with 1 and 8."""
    asked = {(k * 1024, count) for k in (4, 32, 128) for count in (1, 8, 64)}
    assert set(LLAMA_3_8B.decodes) == asked | {(512 * 1024, 1), (512 * 1024, 8)}
    assert LLAMA_3_8B.token_bytes == 4096


def test_time_is_of_one_work() -> None:
    """Two functions are timed, and the result is seconds of one call."""
    calls = []
    took = seconds(CPU, [lambda: calls.append(1), lambda: calls.append(2)], 3)
    assert calls == [1, 2] * 3
    assert 0 < took < 1
