"""Compiled mixtures: the rule of a block is found by trial, and its routing is transformers'."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.experts.routing import routed
from ropewalk.model_runtime.cpu_kernels.experts.stages import unit_edge
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import (
    FLOAT32,
    RowProducts,
    _taker,
    own_panels,
)
from ropewalk.model_runtime.cpu_kernels.threads import _runner
from ropewalk.model_runtime.layers.experts.mixture import Mixture
from ropewalk.model_runtime.layers.experts.routing import RuledForward
from tests.model_runtime.layers.test_experts import (
    assert_near,
    block_of,
    in_float64,
    packed,
    rows,
)

COMPILED = {  # -> normalised
    "qwen3_moe": False, "mixtral": True, "gpt_oss": True, "olmoe": False, "granitemoe": True,
    "granitemoe_swa": True, "granitemoeshared": True, "cohere2_moe": True,
}  # fmt: skip
# Those whose weights have the number type of rows.
ROUNDED = {"granitemoe", "granitemoe_swa", "granitemoeshared", "cohere2_moe"}
# Blocks of one rule differ in their number type.
CASES = [
    *((architecture, torch.float32) for architecture in COMPILED),
    *((architecture, torch.bfloat16) for architecture in ("qwen3_moe", "gpt_oss", "granitemoe")),
    ("cohere2_moe", torch.bfloat16),
]
# Groups and a bias of the choice; a shared expert; a multiplier of the weights.
OTHERS = ("deepseek_v3", "qwen2_moe", "afmoe")


def mixture_in(block: Any) -> Any:
    """The forward that replaces the block's own."""
    return vars(block)["forward"]


@pytest.mark.parametrize(("architecture", "dtype"), CASES, ids=str)
def test_a_compiled_block_answers_as_its_own_code(architecture: str, dtype: torch.dtype) -> None:
    """transformers computes the reference in float64; the block's own code runs by its rules."""
    block = block_of(architecture, dtype)
    exact, x = in_float64(block), rows(33, dtype)
    packed(block)
    mixture = mixture_in(block)
    assert isinstance(mixture, Mixture)
    assert mixture.is_normalised is COMPILED[architecture]
    is_rounded = architecture in ROUNDED and dtype == torch.bfloat16
    assert mixture.is_rounded is is_rounded
    found, own, wide = (call(given[None]) for call, given in (
        (block, x), (mixture.ruled, x), (exact, x.double()),
    ))  # fmt: skip
    if mixture.is_pair:
        found, own, wide = found[0], own[0], wide[0]
    assert found.shape == own.shape
    assert_near(found[0], own[0].double(), dtype)
    assert_near(found[0], wide[0], dtype)


@pytest.mark.parametrize("architecture", OTHERS)
def test_a_block_with_another_rule_keeps_its_own_code(architecture: str) -> None:
    """Its forward still follows the rules of a CPU."""
    block = packed(block_of(architecture, torch.float32))
    assert isinstance(mixture_in(block), RuledForward)


class _Doubled(nn.Module):
    """A router whose weights are doubled after the softmax."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Any:
        logits, weights, choice = self.own(x)
        return logits, 2 * weights, choice


def test_a_changed_rule_is_found_by_trial_and_not_by_name() -> None:
    """The class of the block is that of a compiled one."""
    block = block_of("qwen3_moe", torch.float32)
    block.gate = _Doubled(block.gate)
    exact, x = in_float64(block), rows(5, torch.float32)
    packed(block)
    assert isinstance(mixture_in(block), RuledForward)
    assert_near(block(x[None])[0], exact(x.double()[None])[0], torch.float32)


def test_the_trial_leaves_nothing_behind() -> None:
    """Router and experts compute again what they did; another test compares their answers."""
    for architecture in ("qwen3_moe", "deepseek_v3"):
        block = packed(block_of(architecture, torch.float32))
        assert "forward" not in vars(block.experts)


class _Cast(nn.Module):
    """A router whose choice or weights another rule gives."""

    def __init__(self, own: nn.Module, cast: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.own, self.cast = own, cast

    def forward(self, x: Tensor) -> Any:
        logits, weights, choice = self.own(x)
        return logits, *self.cast(weights, choice)


@pytest.mark.parametrize(
    "cast",
    [
        lambda weights, choice: (weights.double(), choice),
        lambda weights, choice: (weights, choice.double()),
        lambda weights, choice: (weights, choice.tolist()),
        lambda weights, choice: (weights[:, :2], choice),
        lambda weights, choice: (weights[0], choice[0]),
        lambda weights, choice: (weights[:0], choice[:0]),
    ],
    ids=["double weights", "double choice", "list", "fewer weights", "one row", "no row"],
)
def test_results_of_other_types_or_shapes_keep_the_own_code(cast: Any) -> None:
    """The trial raises nothing."""
    block = block_of("qwen3_moe", torch.float32)
    block.gate = _Cast(block.gate, cast)
    assert isinstance(mixture_in(packed(block)), RuledForward)


def test_threads_of_a_router_compile_nothing_later() -> None:
    """A warm-up has 32 rows, and a prompt of many rows is the first that threads share."""
    packed(block_of("qwen3_moe", torch.bfloat16))
    signatures = _runner(_taker(FLOAT32.multiply, FLOAT32.between)).signatures
    assert signatures
    before = list(signatures)
    many = RowProducts(own_panels(torch.ones(128, 1024), None), 1024, FLOAT32)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        many(torch.ones(512, 1024))
    finally:
        torch.set_num_threads(torch_threads)
    assert _runner(_taker(FLOAT32.multiply, FLOAT32.between)).signatures == before


def expected_routing(logits_RE: Tensor, num: int, *, is_normalised: bool) -> tuple[Any, Tensor]:
    """Choices by a stable sort, and weights in float64."""
    choice_RC = torch.sort(logits_RE, descending=True, stable=True).indices[:, :num]
    scores_RE = logits_RE.double().softmax(-1)
    weights_RC = scores_RE.gather(-1, choice_RC)
    if is_normalised:
        weights_RC = weights_RC / weights_RC.sum(-1, keepdim=True)
    return choice_RC, weights_RC


@pytest.mark.parametrize("is_normalised", [True, False])
def test_routing_is_a_stable_choice_and_a_softmax(*, is_normalised: bool) -> None:
    """Logits are spread, close, tied in every way, or all zero; every count of choices."""
    generator = torch.Generator().manual_seed(4)
    for num_experts in (1, 7, 16, 60, 128):
        drawn = torch.randn(40, num_experts, generator=generator)
        drawn[10:20] = drawn[10:20].round()
        drawn[20] = 0.0
        drawn[21] *= 60
        drawn[22:25] = drawn[:1]
        for num in {1, min(4, num_experts), num_experts}:
            rule = {"is_normalised": is_normalised}
            choice_RC, weights_RC = routed(drawn.numpy(), num, **rule, is_rounded=False)
            expected = expected_routing(drawn, num, is_normalised=is_normalised)
            assert np.array_equal(choice_RC, expected[0].numpy())
            np.testing.assert_allclose(weights_RC, expected[1].numpy(), rtol=1e-5, atol=1e-37)
            again_RC, rounded_RC = routed(drawn.numpy(), num, **rule, is_rounded=True)
            assert np.array_equal(again_RC, choice_RC)
            in_bfloat16 = torch.from_numpy(weights_RC).bfloat16().float()
            assert np.array_equal(rounded_RC, in_bfloat16.numpy())


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_nan_has_experts_that_exist_and_weights_of_nan(
    *, bad: float, is_normalised: bool
) -> None:
    """Other rows are not touched. A NaN at any place is noticed, chosen or not."""
    clean = torch.randn(9, 8, generator=torch.Generator().manual_seed(5))
    drawn = clean.clone()
    for expert in range(8):
        drawn[expert, expert] = bad
    rule = {"is_normalised": is_normalised, "is_rounded": False}
    choice_RC, weights_RC = routed(drawn.numpy(), 3, **rule)
    assert all(len({*row}) == 3 and 0 <= min(row) <= max(row) < 8 for row in choice_RC.tolist())
    assert np.isnan(weights_RC[:8]).any(-1).all()
    last = routed(clean[8:].numpy(), 3, **rule)
    assert np.array_equal(choice_RC[8:], last[0])
    assert np.array_equal(weights_RC[8:], last[1])


def test_shares_of_a_team_are_all_units_once_and_take_about_as_long() -> None:
    """An expert with more rows takes longer; more threads than units get nothing."""
    generator = np.random.default_rng(0)
    for num_active in (1, 2, 5, 40):
        for num_units in (1, 4, 12):
            starts = np.concatenate([[0], np.cumsum(generator.integers(1, 17, num_active))])
            for num_threads in (1, 2, 3, 16, 64):
                edges = [
                    unit_edge(starts, num_units, each, num_threads)
                    for each in range(num_threads + 1)
                ]
                assert edges[0] == 0
                assert edges[-1] == num_active * num_units
                assert edges == sorted(edges)
                costs = np.repeat(8 + np.diff(starts), num_units)
                spent = [costs[a:b].sum() for a, b in pairwise(edges)]
                assert max(spent) <= costs.sum() / num_threads + 2 * costs.max()
