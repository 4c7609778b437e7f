"""The kernel that draws from a row with a cut tail decides as exact arithmetic does.

Shapes: R = rows, V = vocabulary.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu.sampling import draw_ranked as kernels
from ropewalk.model_runtime.gpu.sampling.draw_ranked import draw_ranked
from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner.ranked_draw import draw_on_device
from ropewalk.model_runtime.runner.sampler import uniform
from tests.oracles.ranked_draws import batches, drawn_exactly, scaled
from tests.sampling import few

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def drawn(logits_RV: Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    """The kernel's draws."""
    return draw_ranked(scaled(logits_RV, params).to(DEVICE), params, uniforms).tolist()


@settings(max_examples=few(60, 5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.integers(0, 5))
def test_the_kernel_decides_exactly(batch: tuple[Tensor, list[SamplingParams]], step: int) -> None:
    """Its draws are those of exact arithmetic, unless a comparison is near, in any company."""
    logits_RV, params = batch
    uniforms = [uniform(each.seed, step) for each in params]
    got = drawn(logits_RV, params, uniforms)
    sorted_ones = draw_on_device(scaled(logits_RV, params), params, uniforms).tolist()
    for row, one in enumerate(params):
        expected, is_near = drawn_exactly(scaled(logits_RV, params)[row], one, uniforms[row])
        assert is_near or got[row] == expected == sorted_ones[row]
    alone = [drawn(logits_RV[[0]], params[:1], uniforms[:1])[0]]
    assert alone == got[:1]


@pytest.mark.costly
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9, temperature=3.0),
        SamplingParams(top_k=40, top_p=0.95),
        SamplingParams(min_p=0.05),
    ],
)
def test_programs_that_share_a_row_draw_as_a_sort_does(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are evenly spread give each token its share."""
    for name, number in (("_BLOCK", 32), ("_LEAST_SPAN", 64), ("_SEARCHED", 128)):
        monkeypatch.setattr(kernels, name, number)
    num, size = (1000, 700) if DEVICE.type == "cuda" else (10, 300)
    row_V = (torch.randn(size, generator=torch.Generator().manual_seed(3)) * 3).bfloat16().float()
    logits_RV, every = row_V.expand(num, size), [params] * num
    uniforms = [(at + 0.5) / num for at in range(num)]
    got = drawn(logits_RV, every, uniforms)
    expected = draw_on_device(scaled(logits_RV, every), every, uniforms).tolist()
    # A token's share ends where a weight's last digits say, which exponential functions differ in.
    assert sum(one != other for one, other in zip(got, expected, strict=True)) <= num // 100
    assert len(set(got)) > 3


def test_a_row_of_nan_harms_no_other() -> None:
    """It gets some token of the vocabulary."""
    logits_RV = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)) * 4
    params = [SamplingParams(top_p=0.8, top_k=top_k) for top_k in (0, 5, 40)]
    expected = drawn(logits_RV, params, [0.2, 0.5, 0.8])
    logits_RV[1] = torch.nan
    got = drawn(logits_RV, params, [0.2, 0.5, 0.8])
    assert (got[0], got[2]) == (expected[0], expected[2])
    assert 0 <= got[1] < 200
