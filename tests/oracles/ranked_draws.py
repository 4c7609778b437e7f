"""Draws from rows with a cut tail in exact arithmetic, and batches of such rows.

Shapes: R = rows, V = vocabulary.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from hypothesis import strategies as st
from torch import Tensor

from ropewalk.model_runtime.request import SamplingParams


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
