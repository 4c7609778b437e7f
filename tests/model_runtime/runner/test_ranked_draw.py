"""Draws from the best tokens of a row equal those of a stable sort of the whole row.

The host's draws equal them to the bit. A device decides with whole numbers, so its draws equal
those of exact arithmetic; in float32 the same decisions may fall otherwise within rounding.

Shapes: R = rows, V = vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner.ranked_draw import (
    draw_on_device,
    draw_on_host,
    pointed_at,
)
from ropewalk.model_runtime.runner.sampler import (
    SamplingRow,
    _allowed,
    in_one_transfer,
    sample,
    uniform,
    unpacked,
)
from tests.oracles.ranked_draws import batches, drawn_exactly, scaled


def drawn_by_whole_sort(
    scaled_RV: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[int]:
    """The draws by a stable sort of values with their ids, all in float32 but the last sum."""
    vocabulary = scaled_RV.shape[-1]

    def column(numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32)[:, None]

    sorted_RV, token_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
    top_k_R1 = column([each.top_k or vocabulary for each in params])
    kth_R1 = sorted_RV.gather(1, (top_k_R1.clamp(max=vocabulary) - 1).long())
    sorted_RV = sorted_RV.masked_fill(sorted_RV < kth_R1, -torch.inf)
    probability_RV = sorted_RV.softmax(dim=-1)
    before_RV = probability_RV.cumsum(dim=-1) - probability_RV
    dropped_RV = before_RV >= column([each.top_p for each in params])
    least_R1 = probability_RV[:, :1] * column([each.min_p for each in params])
    dropped_RV = (dropped_RV | (probability_RV < least_R1)) & (torch.arange(vocabulary) > 0)
    probability_RV = probability_RV.masked_fill(dropped_RV, 0.0)
    tokens: list[int] = token_RV.gather(1, pointed_at(probability_RV, uniforms))[:, 0].tolist()
    return tokens


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(0, 5))
@example((torch.zeros(1, 10), [SamplingParams(top_p=0.3)]), 0)
def test_the_host_draws_as_a_whole_sort(
    batch: tuple[Tensor, list[SamplingParams]], step: int
) -> None:
    """Every draw of every row is the same, also where rounding decides."""
    logits_RV, params = batch
    scaled_RV = scaled(logits_RV, params)
    for offset in range(8):
        uniforms = [uniform(each.seed, step + offset) for each in params]
        got = draw_on_host(scaled_RV, params, uniforms).tolist()
        assert got == drawn_by_whole_sort(scaled_RV, params, uniforms)


@pytest.mark.parametrize("vocabulary", [1000, 32_000])
def test_the_host_draws_as_a_whole_sort_from_many_tokens(vocabulary: int) -> None:
    """The logits have the ties of bfloat16, and the nucleus is narrow, wide or all of the row."""
    params = [
        SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
        for seed, temperature in enumerate((0.5, 1.0, 3.0))
        for top_p, top_k, min_p in ((0.9, 0, 0.0), (0.999, 0, 0.0), (1.0, 200, 0.1), (0.5, 2000, 0))
    ]
    logits_RV = (torch.randn(len(params), vocabulary) * 3).bfloat16().float()
    scaled_RV = scaled(logits_RV, params)
    for step in range(30):
        uniforms = [uniform(each.seed, step) for each in params]
        got = draw_on_host(scaled_RV, params, uniforms).tolist()
        assert got == drawn_by_whole_sort(scaled_RV, params, uniforms)


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(0, 5))
def test_a_device_decides_exactly(batch: tuple[Tensor, list[SamplingParams]], step: int) -> None:
    """Its draws are those of exact arithmetic, and of the host, unless a comparison is near."""
    logits_RV, params = batch
    scaled_RV = scaled(logits_RV, params)
    uniforms = [uniform(each.seed, step) for each in params]
    got = draw_on_device(scaled_RV, params, uniforms).tolist()
    host = draw_on_host(scaled_RV, params, uniforms).tolist()
    for row, one in enumerate(params):
        expected, is_near = drawn_exactly(scaled_RV[row], one, uniforms[row])
        assert is_near or got[row] == host[row] == expected
    # A row's draw is the same without its neighbours.
    alone = [
        draw_on_device(scaled_RV[[row]], [params[row]], [uniforms[row]]).item()
        for row in range(len(params))
    ]
    assert alone == got


@settings(max_examples=25, deadline=None)
@given(batches())
def test_one_transfer_answers_beside_other_rows(
    batch: tuple[Tensor, list[SamplingParams]],
) -> None:
    """Rows with a cut have the same draws between greedy and plain rows."""
    logits_RV, params = batch
    rows = [SamplingRow(each, 3, frozenset()) for each in params]
    _, alone = in_one_transfer(logits_RV, logits_RV, rows)
    rows += [SamplingRow(SamplingParams(temperature=0.0), 0, frozenset())]
    rows += [SamplingRow(SamplingParams(seed=4), 0, frozenset())]
    logits_RV = torch.cat((logits_RV, logits_RV[:1], logits_RV[:1]))
    are_finite, together = in_one_transfer(logits_RV, logits_RV, rows)
    assert are_finite == logits_RV.isfinite().all(-1).tolist()
    assert together == [*alone, *sample(logits_RV[-2:], rows[-2:])]


def test_many_rows_are_sorted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty rows are sorted a few at a time, and draw as on the host."""
    asked: list[int] = []
    sort = Tensor.sort

    def watched(values_RV: Tensor, **how: bool) -> object:
        asked.append(len(values_RV))
        return sort(values_RV, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(Tensor, "sort", watched)
    logits_RV = torch.randn(40, 3000) / 10
    rows = [SamplingRow(SamplingParams(top_p=0.9, seed=seed), 0, frozenset()) for seed in range(40)]
    _, token_ids = in_one_transfer(logits_RV, logits_RV, rows)
    assert asked == [16, 16, 8]
    assert token_ids == sample(logits_RV, rows)


def test_a_row_of_nan_harms_no_other() -> None:
    """A NaN row gets some token of the vocabulary by both ways."""
    logits_RV = torch.randn(3, 2000) * 4
    logits_RV[1] = torch.nan
    rows = [
        SamplingRow(SamplingParams(top_p=0.8, top_k=top_k, seed=4), 0, frozenset())
        for top_k in (0, 5, 40)
    ]
    are_finite, token_ids = in_one_transfer(logits_RV, logits_RV, rows)
    expected = sample(logits_RV, rows)
    assert are_finite == [True, False, True]
    assert (token_ids[0], token_ids[2]) == (expected[0], expected[2])
    assert 0 <= token_ids[1] < 2000
    assert 0 <= expected[1] < 2000


@given(st.lists(st.binary(min_size=13, max_size=13), min_size=1, max_size=4), st.integers(97, 104))
def test_bits_are_unpacked_as_by_numpy(masks: list[bytes], vocabulary: int) -> None:
    """The lowest bit of a byte comes first, and the last byte may be cut."""
    packed_RB = np.frombuffer(bytearray().join(masks), np.uint8).reshape(len(masks), 13)
    expected = np.unpackbits(packed_RB, axis=1, bitorder="little", count=vocabulary)
    got = unpacked(torch.from_numpy(packed_RB), vocabulary)
    assert got.dtype == torch.bool
    assert got.tolist() == expected.astype(bool).tolist()
    assert torch.equal(_allowed(torch.zeros(len(masks), vocabulary), masks), got)
