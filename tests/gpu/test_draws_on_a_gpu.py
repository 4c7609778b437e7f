"""Captured draws, and attention that is chosen by the card, on a GPU.

Shapes: R = rows, V = vocabulary.
"""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu import flash
from ropewalk.model_runtime.gpu.cards import flash_4
from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner.captured_draws import CapturedDraws
from ropewalk.model_runtime.runner.cuda_graphs import cuda_recorder
from ropewalk.model_runtime.runner.sampler import SamplingRow, sampled_on_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.9, temperature=0.8),
    SamplingParams(top_k=40, min_p=0.001),
    SamplingParams(temperature=1.2),
)


def rows_of(num: int, step: int) -> Iterator[SamplingRow]:
    """Rows of all kinds, with seeds of their own."""
    for at in range(num):
        params = PARAMS[(at + step) % len(PARAMS)]
        yield SamplingRow(params, step, frozenset())


def test_captured_draws_are_those_of_queued_kernels() -> None:
    """Numbers of rows lie between two captured ones, over the vocabulary of Llama 3."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(1)
    place_RV = torch.zeros(64, 128_256, device=device)
    draws = CapturedDraws(place_RV, [1, 8, 64], cuda_recorder(device))
    for step, num in enumerate((64, 1, 5, 8, 33, 64)):
        logits_RV = torch.randn(num, 128_256, device=device, generator=generator) * 3
        rows = list(rows_of(num, step))
        expected = sampled_on_device(logits_RV, logits_RV, rows).tolist()
        place_RV[:num] = logits_RV
        told_A = draws.draw(place_RV[:num], rows)
        assert told_A is not None
        assert told_A.tolist() == expected
        assert expected[:num] == [1] * num
        greedy = [at for at, row in enumerate(rows) if row.params.temperature == 0]
        best = logits_RV.argmax(dim=-1).tolist()
        assert [expected[num + at] for at in greedy] == [best[at] for at in greedy]


@pytest.mark.parametrize("mask", flash_4._MASKS)
def test_flash_attention_4_agrees_with_flash_attention_2(mask: flash_4.Mask) -> None:
    """The trial's own comparison, whichever is faster."""
    device = torch.device("cuda")
    if not flash_4.is_installed(device):
        pytest.skip("the extra hopper is not installed, or the card is none of its own")
    assert flash_4._agree(device, flash_4.flash_4, flash.flash, mask)
