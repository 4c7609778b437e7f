"""Formulas that transformers has no function for, against a few lines of arithmetic."""

import math

import pytest
import torch

from ropewalk.rope import NTK, DynamicNTK, Linear, Llama3, LongRope, Rotary, Scaling, Unscaled, Yarn
from ropewalk.rope.angles import Angles, logn_scale, rotate


@pytest.mark.parametrize("rotary_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0, 8.5])
def test_ntk_is_equation_16(rotary_dim: int, factor: float) -> None:
    """The base is multiplied by factor ** (d / (d - 2))."""
    table = NTK(factor=factor).frequencies(Rotary(rotary_dim, 10_000.0))

    base = 10_000.0 * factor ** (rotary_dim / (rotary_dim - 2))
    expected = [base ** (-2 * pair / rotary_dim) for pair in range(rotary_dim // 2)]
    assert table.inv_freq_P.tolist() == pytest.approx(expected, rel=1e-6)
    assert table.attention_factor == 1.0


def test_ntk_slows_the_slowest_pair_by_the_factor_and_keeps_the_fastest() -> None:
    """The exponent d / (d - 2) is chosen for this property."""
    rotary = Rotary(128, 10_000.0)
    native = Linear(factor=1.0).frequencies(rotary).inv_freq_P
    scaled = NTK(factor=8.0).frequencies(rotary).inv_freq_P

    assert scaled[0] == native[0] == 1.0
    assert float(native[-1] / scaled[-1]) == pytest.approx(8.0, rel=1e-5)


def test_published_ntk_bases() -> None:
    """The bases are 20,221 and 51,294 for alpha 2 and 5 at d = 128."""
    slowest = NTK(factor=2.0).frequencies(Rotary(128, 1e4)).inv_freq_P[-1].double()
    assert float(slowest ** (-128 / 126)) == pytest.approx(20_221.3, rel=1e-4)
    slowest = NTK(factor=5.0).frequencies(Rotary(128, 1e4)).inv_freq_P[-1].double()
    assert float(slowest ** (-128 / 126)) == pytest.approx(51_293.8, rel=1e-4)


@pytest.mark.parametrize("factor", [2.0, 8.0, 32.0])
def test_llama3_is_ntk_by_parts_with_alpha_1_and_beta_4(factor: float) -> None:
    """The reference is equations 17 to 20 of the YaRN paper, without the temperature."""
    rotary, trained = Rotary(128, 500_000.0), 8192
    table = Llama3(factor=factor, original_max_position_embeddings=trained).frequencies(rotary)

    for pair, got in enumerate(table.inv_freq_P.tolist()):
        theta = 500_000.0 ** (-2 * pair / 128)
        turns = trained * theta / (2 * math.pi)
        gamma = min(max((turns - 1) / (4 - 1), 0), 1)
        assert got == pytest.approx((1 - gamma) * theta / factor + gamma * theta, rel=2e-6)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    """The published boundaries for Llama 2 are pairs 20 and 46."""
    rotary = Rotary(128, 10_000.0)
    native = Linear(factor=1.0).frequencies(rotary).inv_freq_P
    yarn = Yarn(factor=4.0, original_max_position_embeddings=4096)
    share = (native / yarn.frequencies(rotary).inv_freq_P).tolist()

    assert share[:21] == pytest.approx([1.0] * 21)
    assert share[46:] == pytest.approx([4.0] * 18)
    assert all(1 < each < 4 for each in share[21:46])


@pytest.mark.parametrize(
    ("factor", "expected"), [(2, 1.0693), (4, 1.1386), (8, 1.2079), (32, 1.3466), (1, 1.0)]
)
def test_yarn_temperature(factor: float, expected: float) -> None:
    """The attention factor is 0.1 ln(s) + 1."""
    yarn = Yarn(factor=factor, original_max_position_embeddings=4096)
    assert yarn.frequencies(Rotary(64, 1e4)).attention_factor == pytest.approx(expected, abs=5e-5)


def test_logn_uses_the_one_based_position() -> None:
    """For L = 4,096 the scale is 1 up to L, 1.0833 at 8 k and 1.25 at 32 k."""
    positions = torch.tensor([0, 4095, 4096, 8191, 32_767])
    expected = [1.0, 1.0, math.log(4097) / math.log(4096), 13 / 12, 15 / 12]
    assert logn_scale(positions, 4096).tolist() == pytest.approx(expected, rel=1e-6)


def test_rotation_preserves_length_and_depends_on_the_distance_only() -> None:
    """R(m) q . R(n) k is a function of m - n."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 20, dtype=torch.float64, generator=generator)
    inv_freq = torch.rand(8, dtype=torch.float64, generator=generator)

    def at(position: float) -> Angles:
        return Angles((position * inv_freq).cos(), (position * inv_freq).sin())

    scores = [rotate(query, at(m)) @ rotate(key, at(m - 7)) for m in (7, 50, 1000)]
    assert float(rotate(query, at(123)).norm()) == pytest.approx(float(query.norm()))
    assert scores[1:] == [pytest.approx(float(scores[0]))] * 2


TRAINED = {"original_max_position_embeddings": 256}
LISTS = {"short_factor": (1.0,) * 32, "long_factor": (1.5,) * 32}


@pytest.mark.parametrize(
    "scaling",
    [
        Linear(factor=8.0),
        NTK(factor=8.0),
        DynamicNTK(factor=2.0, num_tokens=1024, **TRAINED),
        Yarn(factor=8.0, **TRAINED),
        Llama3(factor=8.0, **TRAINED),
        LongRope(factor=8.0, num_tokens=512, **TRAINED, **LISTS),
    ],
    ids=lambda each: each.rope_type,
)
def test_scaling_leaves_pairs_that_stand_still(scaling: Scaling) -> None:
    """Gemma 4 rotates the first pairs of a wide head; a method stretches those alone."""
    rotary = Rotary(64, 10_000.0, num_turning=20)
    native_P = Unscaled().frequencies(rotary).inv_freq_P
    whole_P = Unscaled().frequencies(Rotary(64, 10_000.0)).inv_freq_P
    assert torch.equal(native_P[:20], whole_P[:20])
    assert not native_P[20:].any()
    scaled_P = scaling.frequencies(rotary).inv_freq_P
    assert not scaled_P[20:].any()
    assert bool((scaled_P[:20] > 0).all())
    assert bool((scaled_P[:20] <= native_P[:20]).all())
    assert float(scaled_P[19]) < float(native_P[19])


def test_ntk_slows_the_slowest_pair_that_rotates_by_the_factor() -> None:
    """The pairs behind it stand still and have no speed to divide."""
    rotary = Rotary(512, 1e6, num_turning=64)
    native = Unscaled().frequencies(rotary).inv_freq_P
    scaled = NTK(factor=8.0).frequencies(rotary).inv_freq_P
    assert scaled[0] == native[0] == 1.0
    assert float(native[63] / scaled[63]) == pytest.approx(8.0, rel=1e-5)
