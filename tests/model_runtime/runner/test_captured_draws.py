"""Draws that are captured with fixed addresses are those of the same kernels by themselves.

Shapes: R = rows, V = vocabulary.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner import sampler
from ropewalk.model_runtime.runner.captured_draws import CapturedDraws
from ropewalk.model_runtime.runner.cuda_graphs import RecordingError
from ropewalk.model_runtime.runner.penalties import SeenTokens
from ropewalk.model_runtime.runner.sampler import SamplingRow, sampled_on_device
from tests.doubles.recorded_runners import Again

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.8, temperature=0.9, seed=1),
    SamplingParams(top_k=5, min_p=0.01, seed=2),
    SamplingParams(temperature=1.3, seed=3),
    SamplingParams(temperature=0.0, top_p=0.5),
)


def row(params: SamplingParams, step: int = 0, **named: Any) -> SamplingRow:
    """A row of a request that has generated `step` tokens."""
    return SamplingRow(params, step, frozenset(), **named)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are drawn as on a GPU, by Triton's interpreter."""
    monkeypatch.setattr(sampler, "has_gpu_kernels", lambda _: True)


def place_of(num_rows: int, vocabulary: int = 50) -> Tensor:
    """Logits where captured steps write them."""
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.usefixtures("with_kernels")
def test_a_replay_draws_what_its_rows_say() -> None:
    """Numbers of rows between two sizes are padded, and each replay has parameters of its own."""
    place_RV, record = place_of(3), Again()
    draws = CapturedDraws(place_RV, [1, 3], record)
    assert record.num_recorded == 2
    for step, num in enumerate((2, 3)):
        logits_RV = place_of(3) + step
        rows = [row(PARAMS[(2 * step + at) % len(PARAMS)], step) for at in range(num)]
        if num == 2:
            logits_RV[1, 7] = torch.nan
        expected = sampled_on_device(logits_RV[:num], logits_RV[:num], rows).tolist()
        place_RV.copy_(logits_RV)
        got = draws.draw(place_RV[:num], rows)
        assert got is not None
        assert got.tolist() == expected
        assert expected[:num] == logits_RV[:num].isfinite().all(-1).tolist()
    assert record.num_replayed == 2


@pytest.mark.usefixtures("with_kernels")
def test_logits_of_other_steps_and_rows_that_change_them_are_not_drawn_so() -> None:
    """Nothing is replayed then, and the logits stay."""
    place_RV, record = place_of(2), Again()
    draws = CapturedDraws(place_RV, [1, 2], record)
    before = place_RV.copy_(place_of(2)).clone()
    plain = row(PARAMS[1])
    assert draws.draw(place_RV.clone(), [plain] * 2) is None
    for other in (
        row(SamplingParams(logit_bias=((3, 1.0),))),
        row(SamplingParams(repetition_penalty=2.0), seen=SeenTokens([1], [2])),
        row(PARAMS[0], allowed=b"\x01"),
        row(PARAMS[0], barred=(4,)),
        SamplingRow(SamplingParams(min_tokens=2), 0, frozenset({3})),
    ):
        assert draws.draw(place_RV, [plain, other]) is None
    assert record.num_replayed == 0
    assert torch.equal(place_RV, before)


def test_a_draw_that_cannot_be_captured_is_known() -> None:
    """Steps are then queued without captures, as for a step that cannot be captured."""

    def broken(_: Any) -> Any:
        raise RuntimeError("no capture")

    with pytest.raises(RecordingError, match="no capture"):
        CapturedDraws(place_of(2), [1, 2], broken)
