"""Pages of prefixes in the memory of a GPU's host, which only a GPU can copy beside its steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.engine.kv_disk.offload.device_pages import DevicePages, SideStream
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.doubles.engines import EngineFactory, answer, deployment_of, num_same, request
from tests.model_runtime.engine.kv_disk.disk_engines import Server, written

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
NUM_PAGES = 12  # of a prompt that can be reused
GIB = 0.25


@pytest.fixture(scope="module")
def on_gpu() -> Checkpoint:
    return load_checkpoint(EMBEDDED_MODEL, dtype="float32", device="cuda")


def asked(checkpoint: Checkpoint, number: int, **options: Any) -> Any:
    """A request for a prompt of twelve pages; those of other numbers share none."""
    prompt = [100 + number, *((7 * at * at + 3) % 900 for at in range(1, 16 * NUM_PAGES + 8))]
    options = {"max_tokens": 8, "ignore_eos": True, **options}
    return request(deployment_of(checkpoint), prompt, **options)


def test_pages_are_those_that_the_steps_before_have_written() -> None:
    """A long computation writes each page just before its copy, and the page changes just after."""
    sizes = (1 << 20, 1 << 18)
    made = torch.randn(2048, 2048, device="cuda")
    tensors = [torch.zeros(8, size, dtype=torch.uint8, device="cuda") for size in sizes]
    pages = DevicePages(tensors, SideStream(torch.device("cuda")))
    buffers = [pages.new_buffer(pages.num_bytes) for _ in range(8)]
    for page, buffer in enumerate(buffers):
        for _ in range(40):
            made = torch.tanh(made @ made)
        for each in tensors:
            each[page] = page + 1 + made.isnan().sum().to(torch.uint8)
        done = pages.copy_out(page, buffer)
        pages.let_steps_wait(done)
        for each in tensors:
            each[page] = 0
    done.synchronize()
    assert [np.unique(each).tolist() for each in buffers] == [[at] for at in range(1, 9)]
    for page, buffer in enumerate(reversed(buffers)):
        done = pages.copy_in(page, buffer)
    pages.let_steps_wait(done)
    for each in tensors:
        assert each.cpu()[:, ::4097].unique(dim=1).flatten().tolist() == list(range(8, 0, -1))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_evicted_prompts_come_back(
    on_gpu: Checkpoint, engines: EngineFactory, *, enforce_eager: bool
) -> None:
    """Answers are those of a cache that holds all prompts, which computes the same last tokens."""
    whole = engines.over(on_gpu, enforce_eager=enforce_eager)
    for number in range(3):
        answer(whole, asked(on_gpu, number))
    expected = [answer(whole, asked(on_gpu, number))[0] for number in range(3)]
    limits = {"kv_cache_tokens": 16 * 16, "max_model_len": 16 * 16, "enforce_eager": enforce_eager}
    server = Server(engines, on_gpu, None, kv_offload_gib=GIB, **limits)
    for turn in range(3):
        for number in range(3):
            written(server)
            result, num_cached = server.ask(asked(on_gpu, number))
            if turn:  # before that the whole prompt is computed, which rounds otherwise
                assert num_same(result.token_ids, expected[number].token_ids) == 8
            assert num_cached == (NUM_PAGES * 16 if turn else 0)
    server.stop()
    assert server.disk.sum.memory["read"] == 6 * NUM_PAGES


def test_evictions_beside_decodes_that_are_launched_ahead_change_no_token(
    on_gpu: Checkpoint, engines: EngineFactory
) -> None:
    """Long answers run while other prompts come and go, in a cache that is always full."""
    asks = [asked(on_gpu, at % 5, max_tokens=8 + 24 * (at % 2)) for at in range(30)]
    whole = engines.over(on_gpu)
    expected = answer(whole, *asks[:10])
    limits = {"kv_cache_tokens": 40 * 16, "max_model_len": 40 * 16, "max_num_seqs": 3}
    server = Server(engines, on_gpu, None, kv_offload_gib=GIB, **limits)
    found = [each for at in range(0, 30, 10) for each in answer(server.engine, *asks[at : at + 10])]
    server.stop()
    assert server.disk.sum.memory["read"] > 0
    same = [
        num_same(each.token_ids, expected[at % 10].token_ids) == len(each.token_ids)
        for at, each in enumerate(found)
    ]
    # Other batches round otherwise, so a few answers may differ in their last tokens.
    assert same.count(False) <= 3


def test_host_memory_before_a_folder_survives_a_restart(
    on_gpu: Checkpoint, engines: EngineFactory, tmp_path: Path
) -> None:
    """The identity covers the GPU."""
    for num_cached in (0, NUM_PAGES * 16):
        server = Server(engines, on_gpu, tmp_path / "kv", kv_offload_gib=GIB)
        assert server.ask(asked(on_gpu, 0))[1] == num_cached
        server.stop()
