"""The kernels that draw from rows of logits decide as exact arithmetic does.

Shapes: R = rows, V = vocabulary.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.gpu.sampling import draw_ranked as kernels
from ropewalk.model_runtime.gpu.sampling.draw_ranked import draw_rows
from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner.ranked_draw import draw_on_device
from ropewalk.model_runtime.runner.sampler import searches_of, split_told, uniform
from tests.oracles.ranked_draws import batches, drawn_exactly, scaled

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_EXAMPLES = 60 if DEVICE.type == "cuda" else 5  # the interpreter is slow


GREEDY = SamplingParams(temperature=0.0)


def told(
    logits_RV: Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    *,
    in_place: bool = False,
) -> tuple[list[bool], list[int]]:
    """Whether each row is finite, and the kernels' draws; in place as a captured draw."""
    rows = zip(params, uniforms, strict=True)
    cuts = [(each.top_k, each.top_p, each.min_p, number, each.temperature) for each, number in rows]
    logits_RV = logits_RV.to(DEVICE, copy=True).contiguous()
    cuts_RC = torch.tensor(cuts, dtype=torch.float64)
    searches = (True, True, True) if in_place else searches_of(cuts_RC.numpy())
    scaled_RV = logits_RV if in_place else torch.full_like(logits_RV, torch.nan)
    found = draw_rows(logits_RV, cuts_RC.to(DEVICE), scaled_RV, searches)
    return split_told(found.tolist(), len(params))


def drawn(logits_RV: Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    """The kernels' draws."""
    return told(logits_RV, params, uniforms)[1]


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches(), st.integers(0, 5))
def test_the_kernel_decides_exactly(batch: tuple[Tensor, list[SamplingParams]], step: int) -> None:
    """Its draws are those of exact arithmetic, unless a comparison is near, in any company.

    A greedy row stands behind the others.
    """
    logits_RV, params = batch
    uniforms = [uniform(each.seed, step) for each in params]
    logits_RV = torch.cat((logits_RV, logits_RV[:1]))
    are_finite, got = told(logits_RV, [*params, GREEDY], [*uniforms, 0.5])
    assert are_finite == logits_RV.isfinite().all(-1).tolist()
    assert got.pop() == logits_RV[0].tolist().index(logits_RV[0].max())
    logits_RV = logits_RV[:-1]
    sorted_ones = draw_on_device(scaled(logits_RV, params), params, uniforms).tolist()
    for row, one in enumerate(params):
        expected, is_near = drawn_exactly(scaled(logits_RV, params)[row], one, uniforms[row])
        assert is_near or got[row] == expected == sorted_ones[row]
    alone = [drawn(logits_RV[[0]], params[:1], uniforms[:1])[0]]
    assert alone == got[:1]


def test_programs_that_share_a_row_draw_as_a_sort_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has several blocks of a row, and a row several programs."""
    cuts = [
        SamplingParams(top_p=0.9, temperature=3.0),
        SamplingParams(top_k=40, top_p=0.95),
        SamplingParams(min_p=0.05),
    ]
    for name, number in (("_BLOCK", 32), ("_MOVED", 64), ("_LEAST_SPAN", 64), ("_SEARCHED", 128)):
        monkeypatch.setattr(kernels, name, number)
    num, size = (3000, 700) if DEVICE.type == "cuda" else (3, 90)
    row_V = (torch.randn(size, generator=torch.Generator().manual_seed(3)) * 3).bfloat16().float()
    logits_RV, every = row_V.expand(num, size), cuts * (num // 3)
    uniforms = [(at + 0.5) / num for at in range(num)]
    got = drawn(logits_RV, every, uniforms)
    expected = draw_on_device(scaled(logits_RV, every), every, uniforms).tolist()
    # A token's share ends where a weight's last digits say, which exponential functions differ in.
    assert sum(one != other for one, other in zip(got, expected, strict=True)) <= num // 100
    assert len(set(got)) > 1


def test_a_row_of_nan_harms_no_other() -> None:
    """It gets some token of the vocabulary."""
    logits_RV = torch.randn(3, 60, generator=torch.Generator().manual_seed(0)) * 4
    params = [SamplingParams(top_p=0.8, top_k=top_k) for top_k in (0, 5, 40)]
    expected = drawn(logits_RV, params, [0.2, 0.5, 0.8])
    logits_RV[1] = torch.nan
    got = drawn(logits_RV, params, [0.2, 0.5, 0.8])
    assert (got[0], got[2]) == (expected[0], expected[2])
    assert 0 <= got[1] < 60


def test_the_first_of_the_best_tokens_is_chosen_whatever_the_zeros_signs_are() -> None:
    """And broken rows are known."""
    logits_RV = torch.full((6, 3000), -3.0)
    logits_RV[0, [2500, 2700]] = -0.0
    logits_RV[0, 2600] = 0.0
    logits_RV[1, [7, 2900]] = 2.0
    logits_RV[2, 0], logits_RV[3, 2999], logits_RV[4, 50] = torch.nan, -torch.inf, torch.inf
    are_finite, tokens = told(logits_RV, [GREEDY] * 6, [0.0] * 6)
    assert are_finite == [True, True, False, False, False, True]
    assert (tokens[0], tokens[1], tokens[5]) == (2500, 7, 0)


def test_a_plain_temperature_gives_each_token_its_share() -> None:
    """Nothing is cut: evenly spread numbers draw each token as often as its probability says."""
    num = 1000 if DEVICE.type == "cuda" else 10
    logits_V = torch.tensor([1.0, 3.0, 2.0, -4.0, 2.5])
    params = [SamplingParams(temperature=0.7)] * num
    tokens = drawn(logits_V.expand(num, 5), params, [(at + 0.5) / num for at in range(num)])
    shares = torch.bincount(torch.tensor(tokens), minlength=5) / num
    assert torch.allclose(shares, (logits_V / 0.7).softmax(-1), atol=2 / num)


def test_a_captured_draw_makes_all_searches_in_the_place_of_the_logits() -> None:
    """Those that no row needs change nothing."""
    logits_RV = torch.randn(3, 60, generator=torch.Generator().manual_seed(2)) * 3
    for params in (
        [GREEDY, SamplingParams(top_k=7), SamplingParams(temperature=0.6)],
        [SamplingParams(top_p=0.7), SamplingParams(min_p=0.1), GREEDY],
    ):
        numbers = [0.1, 0.6, 0.95]
        assert told(logits_RV, params, numbers) == told(logits_RV, params, numbers, in_place=True)
