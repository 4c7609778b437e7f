"""The GPU's benchmark at sizes that Triton's interpreter can run."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from benchmarks import gpu_attention
from benchmarks.gpu_inputs import PAGE_SIZE, TINY, Cache

pytestmark = pytest.mark.costly(by="file")

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
