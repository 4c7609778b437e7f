"""Attention against distance: naive loops and simulated dot products."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from ropewalk.rope import Frequencies, Linear, Rotary, Unscaled, Yarn
from ropewalk.rope.decay import Moments, decay_bound, expected_score, score_spread

ROTARY = Rotary(16, 10_000.0)
TABLES = [
    Unscaled().frequencies(ROTARY),
    Linear(factor=4.0).frequencies(ROTARY),
    Yarn(factor=8.0, original_max_position_embeddings=256).frequencies(ROTARY),
]
HEAD_DIM, REST = 20, 4  # the last four dimensions do not rotate
DISTANCES = torch.tensor([0, 1, 2, 7, 64, 1000])
SCALING = HEAD_DIM**-0.5


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("distance", [0, 1, 5, 37, 1024, 131_071])
def test_the_bound_is_the_mean_of_partial_sums(table: Frequencies, distance: int) -> None:
    """A loop over Python's floats computes (1 / (d / 2)) * sum |S_j|.

    The formula is that of arXiv 2104.09864, section 3.4.3.
    """
    thetas = table.inv_freq_P.tolist()
    partial = [
        abs(sum(cmath.exp(1j * distance * theta) for theta in thetas[:num_pairs]))
        for num_pairs in range(1, len(thetas) + 1)
    ]
    expected = table.attention_factor**2 * sum(partial) / len(partial)
    assert float(decay_bound(table, torch.tensor([distance]))) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rotary_dim", [16, 64, 128])
def test_at_no_distance_the_bound_is_the_mean_of_1_to_half_d(rotary_dim: int) -> None:
    """The mean is (d / 2 + 1) / 2; the bound falls from there, later for a slower table."""
    rotary = Rotary(rotary_dim, 10_000.0)
    native, slower = (
        decay_bound(scaling.frequencies(rotary), torch.tensor([0, 16, 64, 128]))
        for scaling in (Unscaled(), Linear(factor=4.0))
    )
    assert float(native[0]) == float(slower[0]) == (rotary_dim / 2 + 1) / 2
    assert bool((native[1:] < native[0]).all())
    # Linear interpolation is the native table at a quarter of the distance.
    quarter = decay_bound(Unscaled().frequencies(rotary), torch.tensor([0, 4, 16, 32]))
    assert torch.allclose(slower, quarter, rtol=1e-6)


def _random_moments(num_heads: int) -> tuple[Moments, Tensor]:
    """Moments of correlated dimensions of unequal sizes, and a root of the covariance."""
    root_HDD = torch.randn(num_heads, HEAD_DIM, HEAD_DIM, dtype=torch.float64) / 3
    mean_HD = torch.randn(num_heads, HEAD_DIM, dtype=torch.float64)
    return Moments(mean_HD, root_HDD @ root_HDD.transpose(1, 2)), root_HDD


def _draw(moments: Moments, root_HDD: Tensor, num: int) -> Tensor:
    """Vectors of these moments, evenly and not normally distributed, [H, num, D]."""
    noise = (torch.rand(len(root_HDD), num, HEAD_DIM, dtype=torch.float64) - 0.5) * math.sqrt(12)
    return moments.mean_HD[:, None] + noise @ root_HDD.transpose(1, 2)


def _turned(x_HND: Tensor, table: Frequencies, position: int) -> Tensor:
    """The vectors rotated by matrices and scaled by the attention factor."""
    matrix = torch.eye(HEAD_DIM, dtype=torch.float64)
    num_pairs = len(table.inv_freq_P)
    for pair, theta in enumerate(table.inv_freq_P.tolist()):
        cos, sin = math.cos(position * theta), math.sin(position * theta)
        rows = [pair, pair + num_pairs]
        block = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
        matrix[torch.tensor(rows)[:, None], torch.tensor(rows)] = table.attention_factor * block
    return x_HND @ matrix.T


@pytest.mark.parametrize("table", TABLES)
def test_mean_and_spread_are_those_of_simulated_scores(table: Frequencies) -> None:
    """The reference is 100,000 rotated dot products per distance; the bound is six errors."""
    num = 100_000
    (query, query_root), (key, key_root) = _random_moments(2), _random_moments(2)
    expected_HM = expected_score(query, key, table, DISTANCES, SCALING)
    spread_HM = score_spread(query, key, table, DISTANCES, SCALING)
    for column, distance in enumerate(DISTANCES.tolist()):
        turned_query = _turned(_draw(query, query_root, num), table, 500 + distance)
        turned_key = _turned(_draw(key, key_root, num), table, 500)
        score_HN = SCALING * (turned_query * turned_key).sum(-1)
        error_H = 6 * spread_HM[:, column] / math.sqrt(num)
        assert bool(((score_HN.mean(-1) - expected_HM[:, column]).abs() < error_H).all())
        assert torch.allclose(score_HN.std(-1), spread_HM[:, column], rtol=0.03)


def test_zero_means_leave_no_expectation_but_a_spread() -> None:
    """Constant vectors have no spread."""
    moments, _ = _random_moments(1)
    centred = Moments(torch.zeros_like(moments.mean_HD), moments.covariance_HDD)
    constant = Moments(moments.mean_HD, torch.zeros_like(moments.covariance_HDD))
    table = TABLES[-1]
    assert not bool(expected_score(centred, moments, table, DISTANCES, SCALING).any())
    assert bool((score_spread(centred, centred, table, DISTANCES, SCALING) > 0.1).all())
    assert not bool(score_spread(constant, constant, table, DISTANCES, SCALING).any())
    fixed = float(moments.covariance_HDD.diagonal(dim1=1, dim2=2).sum().sqrt())
    assert float(moments.spread_H) == pytest.approx(fixed)


def test_without_rotated_dimensions_distance_does_not_matter() -> None:
    """A layer without rotary embeddings has no rotated dimensions."""
    (query, _), (key, _) = _random_moments(3), _random_moments(3)
    none = Frequencies(torch.empty(0), 1.0)
    products_H = (query.mean_HD * key.mean_HD).sum(-1, keepdim=True) * SCALING
    expected = expected_score(query, key, none, DISTANCES, SCALING)
    assert torch.allclose(expected, products_H.expand(3, len(DISTANCES)))
    spread = score_spread(query, key, none, DISTANCES, SCALING)
    assert torch.allclose(spread, spread[:, :1].expand_as(spread))
