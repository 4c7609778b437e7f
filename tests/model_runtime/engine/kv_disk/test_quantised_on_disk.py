"""Pages in few bits outlive the engine, with the same bits cold, warm and half deleted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.model_runtime.attention.quantised.page_format import FORMATS
from ropewalk.model_runtime.cpu_kernels.quantised.quantise import quantise_page
from ropewalk.model_runtime.cpu_kernels.quantised.records import Sides
from ropewalk.model_runtime.engine.kv_disk.finite import Records, quantised_check
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request
from tests.model_runtime.engine.kv_disk import late_copies
from tests.model_runtime.engine.kv_disk.disk_engines import (
    PROMPT,
    Server,
    files,
    with_weights,
    written,
)

NUM_PAGES = 6  # of 32 tokens that can be reused
CASES = [
    ("int8", "llama", torch.float32),
    ("k8v4", "llama", torch.bfloat16),
    ("int4", "gemma3_text", torch.float32),  # with windows
]


def small(kind: str) -> dict[str, Any]:
    return {"kv_cache_dtype": kind, "page_size": 32}


@pytest.mark.parametrize(("kind", "architecture", "dtype"), CASES, ids=str)
def test_answers_are_equal_to_the_bit_cold_warm_and_half_deleted(
    engines: EngineFactory, tmp_path: Path, kind: str, architecture: str, dtype: torch.dtype
) -> None:
    """An engine without a disk gives the expected bits. Files have the bytes of quantised pages."""
    made = checkpoint_of(in_dtype(tiny_model(architecture), dtype))
    checkpoint = with_weights(made, tmp_path / "model")
    asked = request(deployment_of(checkpoint), PROMPT, max_tokens=40, logprobs=4)
    expected = answer(engines.over(checkpoint, **small(kind)), asked)[0]
    folder, found = tmp_path / "kv", []
    for number in range(3):
        server = Server(engines, checkpoint, folder, **small(kind))
        result, num_cached = server.ask(replace(asked, request_id=f"again-{number}"))
        assert result == expected
        found.append(num_cached)
        server.stop()
        if number == 1:
            sizes = {path.stat().st_size for path in files(folder)}
            assert sizes == {128 + FORMATS[kind].page_bytes(checkpoint.plans, 32)}
            for path in files(folder)[3:]:
                path.unlink()
    assert found == [0, NUM_PAGES * 32, 3 * 32]


def test_quantised_pages_come_back_from_the_memory_of_a_gpus_host(
    engines: EngineFactory, llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds one prompt; its records are copied late, as a device may copy them."""
    late_copies.use(monkeypatch)
    limits = {**small("int4"), "kv_cache_tokens": 8 * 32, "max_model_len": 8 * 32}
    deployment = deployment_of(llama_checkpoint)
    asked = [
        request(deployment, [100 + number, *PROMPT[1:]], max_tokens=4, logprobs=2)
        for number in range(2)
    ]
    expected = [answer(engines.over(llama_checkpoint, **limits), each)[0] for each in asked]
    server = Server(engines, llama_checkpoint, None, kv_offload_gib=0.25, **limits)
    for turn in range(2):
        for each, wanted in zip(asked, expected, strict=True):
            written(server)
            found = server.ask(replace(each, request_id=f"{each.request_id}-{turn}"))
            assert found == (wanted, turn * NUM_PAGES * 32)
    server.stop()
    assert server.disk.sum.memory["read"] >= NUM_PAGES
    num_bytes = FORMATS["int4"].page_bytes(llama_checkpoint.plans, 32)
    assert server.disk.sum.num_memory_bytes >= 2 * NUM_PAGES * num_bytes


def test_a_page_of_another_format_is_not_found(
    engines: EngineFactory, llama_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Not even int8 and k8v4, whose keys are alike."""
    checkpoint = with_weights(llama_checkpoint, tmp_path / "model")
    for kind in (*FORMATS, "auto"):
        server = Server(engines, checkpoint, tmp_path / "kv", **small(kind))
        asked = request(deployment_of(checkpoint), PROMPT, max_tokens=1)
        assert server.ask(asked)[1] == 0
        server.stop()
    assert len(list((tmp_path / "kv" / "v1").iterdir())) == 4


@pytest.mark.parametrize("kind", FORMATS)
def test_a_quantised_page_with_a_number_that_is_none_is_found(kind: str) -> None:
    """Wherever it is, in keys or values of any head; 100,000 is beyond a float16, and a number."""
    form, heads, page, dim = FORMATS[kind], 2, 32, 64

    class Layer:
        num_key_heads, key_dim, value_dim = heads, dim, dim

    size = form.record_bytes(Layer(), page)
    check = quantised_check([Records(heads, size, *form.parameter_bytes(Layer(), page))] * 2)
    sides = Sides(heads, dim, dim, page, form.key_bits, form.value_bits, form.value_groups(dim))
    draw = np.random.default_rng(3)
    for place, number in ((0, 1e9), (17, np.nan), (3600, np.inf), (4095, -np.inf)):
        numbers = draw.normal(size=(2 * heads, 2 * page * dim)).astype(np.float32)
        numbers[3, place] = number
        records = np.zeros((2 * heads, size), np.uint8)
        for row, record in zip(numbers, records, strict=True):
            quantise_page(row, record, sides)
        records[:, form.parameter_bytes(Layer(), page)[1] :] = 0xFF  # behind them there is nothing
        assert check(records.reshape(-1)) == np.isfinite(number)


def test_rounded_pages_outlive_the_engine_with_the_same_bits(
    engines: EngineFactory, llama_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Files of bfloat16 under a model in float32 have half the bytes, and an identity of their own.

    A page of the exact cache is not found.
    """
    checkpoint = with_weights(llama_checkpoint, tmp_path / "model")
    asked = request(deployment_of(checkpoint), PROMPT, max_tokens=40, logprobs=4)
    expected = answer(engines.over(checkpoint, **small("bfloat16")), asked)[0]
    found, sizes = [], []
    for number, kind in enumerate(("auto", "bfloat16", "bfloat16")):
        server = Server(engines, checkpoint, tmp_path / "kv", **small(kind))
        result, num_cached = server.ask(replace(asked, request_id=f"again-{number}"))
        assert (result == expected) == (kind == "bfloat16")
        found.append(num_cached)
        server.stop()
        sizes.append({path.stat().st_size - 128 for path in files(tmp_path / "kv")})
    assert found == [0, 0, NUM_PAGES * 32]
    (exact,) = sizes[0]
    assert sizes[1] == sizes[2] == {exact, exact // 2}
