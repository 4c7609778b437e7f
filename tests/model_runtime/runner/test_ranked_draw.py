"""Draws from the best tokens of a row equal those of a stable sort of the whole row.

The host's draws equal them to the bit. A device decides with whole numbers, so its draws equal
those of exact arithmetic; in float32 the same decisions may fall otherwise within rounding.

Shapes: R = rows, V = vocabulary.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.model_runtime.request import SamplingParams
from ropewalk.model_runtime.runner import sampler
from ropewalk.model_runtime.runner.ranked_draw import (
    NOT_FOUND,
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
from tests.sampling import few


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


def drawn_exactly(scaled: Tensor, params: SamplingParams, number: float) -> tuple[int, bool]:
    """One row's token in exact arithmetic over float64 weights, and whether it was a near thing.

    It is near if rounding in float32 may decide a comparison otherwise.
    """
    values = scaled.tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    near = False

    def is_less(one: Fraction, other: Fraction, scale: Fraction) -> bool:
        nonlocal near
        near |= abs(one - other) <= scale / 2**14
        return one < other

    weights = [Fraction(math.exp(values[token])) for token in order]
    if params.top_k:
        kth = values[order[min(params.top_k, len(order)) - 1]]
        weights = [
            weight if values[token] >= kth else Fraction(0)
            for token, weight in zip(order, weights, strict=True)
        ]
    total, before = sum(weights, Fraction(0)), Fraction(0)
    kept = []
    for rank, weight in enumerate(weights):
        is_in = is_less(before, Fraction(params.top_p) * total, total) if params.top_p < 1 else True
        if params.min_p and weight:
            is_in &= not is_less(weight, Fraction(params.min_p) * weights[0], weight)
        kept.append(weight if is_in or not rank else Fraction(0))
        before += weight
    all_kept, cumulated = sum(kept, Fraction(0)), Fraction(0)
    chosen = 0
    for rank, weight in enumerate(kept):
        cumulated += weight
        if weight and is_less(Fraction(number) * all_kept, cumulated, all_kept):
            chosen = rank
            break
    return order[chosen], near


CUTS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-5, 1e-3, 0.3, 0.8, 1.0, 1.7, 50.0, 1e30]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.0, 1e-9, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1 - 1e-7])
    | st.floats(0.001, 0.999),
    min_p=st.sampled_from([0.0, 0.0, 1e-12, 0.05, 0.3, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, list[SamplingParams]]:
    """Logits [R, V] of one to five rows, with ties and -inf, and parameters that cut."""
    num_rows, vocabulary = (
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 2, 5, 16, 17, 90, 300])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = []
    for _ in range(num_rows):
        row_V = torch.randn(vocabulary, generator=generator) * draw(st.sampled_from([0.01, 1, 4]))
        # Logits of bfloat16 have many ties; a step of 1 has some on every rank.
        step = draw(st.sampled_from([None, "bfloat16", 0.5, 1.0, 1000.0]))
        if step == "bfloat16":
            row_V = row_V.bfloat16().float()
        elif step is not None:
            row_V = (row_V / float(step)).round() * float(step)
        if draw(st.booleans()):
            hidden_V = torch.rand(vocabulary, generator=generator) < draw(st.floats(0, 0.99))
            hidden_V[draw(st.integers(0, vocabulary - 1))] = False
            row_V[hidden_V] = -torch.inf
        rows.append(row_V)
    return torch.stack(rows), draw(st.lists(CUTS, min_size=num_rows, max_size=num_rows))


def scaled(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The logits after the temperature, as the sampler computes them."""
    relative_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    return relative_RV / torch.tensor([each.temperature for each in params])[:, None]


@settings(max_examples=few(300, 60), deadline=None)
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


@settings(max_examples=few(300, 60), deadline=None)
@given(batches(), st.integers(1, 320), st.integers(0, 5))
@example((torch.zeros(1, 10), [SamplingParams(top_p=0.5)]), 9, 0)
def test_candidates_decide_as_all_tokens_do(
    batch: tuple[Tensor, list[SamplingParams]], most: int, step: int
) -> None:
    """Among few candidates the token is that of all of them, or it is said not to be there."""
    logits_RV, params = batch
    scaled_RV = scaled(logits_RV, params)
    uniforms = [uniform(each.seed, step) for each in params]
    whole = draw_on_device(scaled_RV, params, uniforms, scaled_RV.shape[-1]).tolist()
    assert NOT_FOUND not in whole
    got = draw_on_device(scaled_RV, params, uniforms, most).tolist()
    assert all(token in (NOT_FOUND, expected) for token, expected in zip(got, whole, strict=True))
    if most >= scaled_RV.shape[-1]:
        assert got == whole
    # A row's draw is the same without its neighbours.
    alone = [
        draw_on_device(scaled_RV[[row]], [params[row]], [uniforms[row]], most).item()
        for row in range(len(params))
    ]
    assert alone == got


@settings(max_examples=few(300, 60), deadline=None)
@given(batches(), st.integers(0, 5))
def test_a_device_decides_exactly(batch: tuple[Tensor, list[SamplingParams]], step: int) -> None:
    """Its draws are those of exact arithmetic, and of the host, unless a comparison is near."""
    logits_RV, params = batch
    scaled_RV = scaled(logits_RV, params)
    uniforms = [uniform(each.seed, step) for each in params]
    got = draw_on_device(scaled_RV, params, uniforms, scaled_RV.shape[-1]).tolist()
    host = draw_on_host(scaled_RV, params, uniforms).tolist()
    for row, one in enumerate(params):
        expected, is_near = drawn_exactly(scaled_RV[row], one, uniforms[row])
        assert is_near or got[row] == host[row] == expected


@pytest.mark.parametrize(
    ("params", "is_found"),
    [
        (SamplingParams(top_p=0.5), True),
        (SamplingParams(top_p=0.9999), False),
        (SamplingParams(top_k=64), False),  # others may be equal to the last of them
        (SamplingParams(top_k=63), True),
        (SamplingParams(top_k=1000), False),
        (SamplingParams(min_p=0.5), True),
        (SamplingParams(min_p=1e-9), False),
    ],
)
def test_a_nucleus_within_the_candidates_needs_no_others(
    params: SamplingParams, *, is_found: bool
) -> None:
    """The 64 best of 500 tokens with falling logits suffice, or they do not."""
    scaled_1V = torch.arange(500).flip(0)[None] * 0.05 - 499 * 0.05
    (token,) = draw_on_device(scaled_1V, [params], [0.3], 64).tolist()
    assert (token != NOT_FOUND) is is_found


@settings(max_examples=few(100, 40), deadline=None)
@given(batches(), st.integers(1, 40))
def test_one_transfer_answers_whatever_is_needed(
    batch: tuple[Tensor, list[SamplingParams]], most: int
) -> None:
    """Rows whose candidates do not suffice are drawn again, between greedy and plain rows."""
    logits_RV, params = batch
    rows = [SamplingRow(each, 3, frozenset()) for each in params]
    rows += [SamplingRow(SamplingParams(temperature=0.0), 0, frozenset())]
    rows += [SamplingRow(SamplingParams(seed=4), 0, frozenset())]
    logits_RV = torch.cat((logits_RV, logits_RV[:1], logits_RV[:1]))
    are_finite, few = in_one_transfer(logits_RV, logits_RV, rows, most)
    assert are_finite == logits_RV.isfinite().all(-1).tolist()
    assert few == in_one_transfer(logits_RV, logits_RV, rows)[1]
    assert few[-2:] == sample(logits_RV[-2:], rows[-2:])


def test_many_wide_rows_are_sorted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty rows of a flat distribution need all of their tokens, a few rows at a time."""
    asked: list[tuple[int, int]] = []

    def watched(scaled_RV: Tensor, params: Sequence[SamplingParams], *rest: object) -> Tensor:
        (_, most) = rest
        asked.append((len(params), int(str(most))))
        return draw_on_device(scaled_RV, params, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sampler, "draw_on_device", watched)
    logits_RV = torch.randn(40, 3000) / 10
    rows = [SamplingRow(SamplingParams(top_p=0.9, seed=seed), 0, frozenset()) for seed in range(40)]
    _, token_ids = in_one_transfer(logits_RV, logits_RV, rows)
    assert asked == [(40, 1024), (16, 3000), (16, 3000), (8, 3000)]
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
