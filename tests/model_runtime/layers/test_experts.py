"""Experts on a CPU: transformers' answers in float64, and the bits of each row in any company."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.layers import packed_linear
from ropewalk.model_runtime.layers.experts.lay_out import pack
from ropewalk.model_runtime.layers.experts.routing import expert_blocks, rule
from tests.checkpoints.tiny_models import in_dtype, tiny_model

# Joined gate and up; transposed; transposed with gate and up in turn, biases and a clamp.
LAYOUTS = ("qwen3_moe", "aria_text", "gpt_oss")
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative to the norm of a row
DTYPES = (torch.float32, torch.bfloat16)
NUM_EXPERTS, WIDTH = 8, 64


@cache
def _block(architecture: str) -> nn.Module:
    """The block of a layer in float32, with experts between 64 and 96 dimensions wide."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    sizes = dict.fromkeys(names, NUM_EXPERTS) | {"num_experts_per_tok": 3, "moe_topk": 3}
    model = tiny_model(architecture, **sizes, moe_intermediate_size=96)
    block, _ = next(expert_blocks(model))
    for parameter in block.parameters():
        parameter.requires_grad_(requires_grad=False)
    return block


def block_of(architecture: str, dtype: torch.dtype) -> Any:
    """A copy of the block, as transformers has it."""
    return in_dtype(copy.deepcopy(_block(architecture)), dtype)  # type: ignore[arg-type]


def packed(block: Any) -> Any:
    """The block with rules and panels, in place."""
    holder = nn.ModuleList([block])
    rule(holder)
    packed_linear.pack(holder)
    packed_linear.replace_activations(holder)
    pack(holder, next(block.parameters()).dtype)
    return block


def exact_experts(block: Any, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
    """transformers' loop over experts, in float64."""
    return in_float64(block).experts(x.double(), choice, weights.double())  # type: ignore[no-any-return]


def in_float64(block: Any) -> Any:
    """A copy of transformers' block in float64, with its loop over experts."""
    wide = copy.deepcopy(block).double()
    wide.experts.config = copy.copy(wide.experts.config)
    wide.experts.config._experts_implementation = "eager"
    return wide


def rows(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random rows of the blocks' width."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator).to(dtype)


def chosen(count: int, num_choices: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random choices without repetition, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, NUM_EXPERTS, generator=generator)
    return scores.topk(num_choices).indices, torch.rand(count, num_choices, generator=generator)


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Rows differ by rounding, relative to their norm."""
    apart = (found.double() - exact).norm(dim=-1)
    assert bool((apart <= _ROUNDING[dtype] * exact.norm(dim=-1) + 1e-30).all())


def _one(count: int) -> Tensor:
    return torch.full((count, 1), NUM_EXPERTS - 1)


# Name -> the choices of so many rows.
ROUTINGS: dict[str, Callable[[int], Tensor]] = {
    "random": lambda count: chosen(count, 3)[0],
    "all rows to the last expert": _one,
    "each row another": lambda count: torch.arange(count)[:, None] % NUM_EXPERTS,
    "every expert": lambda count: chosen(count, NUM_EXPERTS)[0],
    "two experts only": lambda count: torch.tensor([[5, 2]]).expand(count, 2),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", LAYOUTS)
def test_rows_have_their_bits_in_any_company_and_the_answer_of_float64(
    architecture: str, dtype: torch.dtype, routing: str
) -> None:
    """An expert gets 1 to 65 rows: none, a part of 16, and several times 16."""
    count = 65
    x, choice = rows(count, dtype), ROUTINGS[routing](count)
    weights = chosen(count, choice.shape[1])[1]
    block = block_of(architecture, dtype)
    exact = exact_experts(block, x, choice, weights)
    experts = packed(block).experts
    together = experts(x, choice, weights)
    assert together.dtype == dtype
    assert_near(together, exact, dtype)
    for first, end in ((0, 1), (1, 3), (3, 20), (20, 37), (37, 65)):
        part = slice(first, end)
        assert torch.equal(experts(x[part], choice[part], weights[part]), together[part])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    assert torch.equal(experts(x[order], choice[order], weights[order]), together[order])


def test_threads_change_no_bit() -> None:
    """Parts of a few panels begin and end inside an expert."""
    experts = packed(block_of("gpt_oss", torch.float32)).experts
    x, (choice, weights) = rows(1500, torch.float32), chosen(1500, 3)
    before = torch.get_num_threads()
    expected = experts(x, choice, weights)
    try:
        for num_threads in (2, 3, 8):
            torch.set_num_threads(num_threads)
            assert torch.equal(experts(x, choice, weights), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_an_expert_that_no_row_chose_is_not_read(architecture: str) -> None:
    """Its NaN reaches no answer; one that a row chose does, and stays in this row."""
    block = block_of(architecture, torch.float32)
    block.experts.gate_up_proj[4] = float("nan")
    x = rows(9, torch.float32)
    choice = torch.tensor([[0, 1, 7]]).repeat(9, 1)
    weights = torch.full((9, 3), 0.5)
    expected = exact_experts(block, x, choice, weights)
    experts = packed(block).experts
    assert_near(experts(x, choice, weights), expected, torch.float32)
    choice[3, 1] = 4
    found = experts(x, choice, weights)
    assert bool(found[3].isnan().all())
    assert bool(found[torch.arange(9) != 3].isfinite().all())


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_zeros_in_weights_rows_and_shares_are_exact(architecture: str) -> None:
    """An expert of zeros adds its biases only; a share of zero adds nothing."""
    block = block_of(architecture, torch.float32)
    block.experts.gate_up_proj[2] = 0.0
    block.experts.down_proj[2] = 0.0
    x = rows(6, torch.float32)
    x[5] = 0.0
    choice = torch.tensor([[2, 2]] * 3 + [[2, 6]] * 3)
    weights = torch.tensor([[0.25, 0.5], [0.0, 0.0], [1.0, 0.0]] * 2)
    expected = exact_experts(block, x, choice, weights)
    found = packed(block).experts(x, choice, weights)
    assert_near(found, expected, torch.float32)
    assert not bool(found[1].any())


def test_a_nan_in_a_row_stays_there() -> None:
    """Rows of one expert lie beside each other in its product."""
    experts = packed(block_of("qwen3_moe", torch.float32)).experts
    x, choice, weights = rows(20, torch.float32), _one(20), torch.ones(20, 1)
    clean = experts(x, choice, weights)
    x[7, 3] = float("nan")
    found = experts(x, choice, weights)
    others = torch.arange(20) != 7
    assert torch.equal(found[others], clean[others])
    assert bool(found[7].isnan().all())


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    """The kernel would read memory that is not the weights'."""
    experts = packed(block_of("qwen3_moe", torch.float32)).experts
    with pytest.raises(IndexError, match=r"experts must be < 8\. Given: 8"):
        experts(rows(1, torch.float32), torch.tensor([[8]]), torch.ones(1, 1))


def _choices(block: Any, x: Tensor) -> Tensor:
    """The experts that a block chooses for each row, ascending; `block` may be packed."""
    seen = []
    name = "multiply" if hasattr(block.experts, "multiply") else "forward"
    inner = getattr(block.experts, name)
    setattr(
        block.experts,
        name,
        lambda x, choice, weights: seen.append(choice) or inner(x, choice, weights),
    )
    block(x[None])
    return torch.as_tensor(seen[0]).sort(-1).values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_among_equal_scores_the_lower_expert_is_chosen(dtype: torch.dtype) -> None:
    """torch's own order is that of its algorithm: a router of zeros chooses others there."""
    zero = block_of("qwen3_moe", dtype)
    zero.gate.weight.zero_()
    x = rows(5, dtype)
    assert _choices(packed(zero), x).tolist() == [[0, 1, 2]] * 5
    twins = block_of("qwen3_moe", dtype)
    twins.gate.weight[4:] = twins.gate.weight[:4]
    for row in _choices(packed(twins), rows(50, dtype)).tolist():
        assert all(each < 4 or each - 4 in row for each in row)


def test_bfloat16_rows_choose_the_experts_of_exact_logits() -> None:
    """In bfloat16, logits tie or change places in several rows of a hundred."""
    block = block_of("qwen3_moe", torch.bfloat16)
    x = rows(400, torch.bfloat16)
    exact = (x.double() @ block.gate.weight.double().t()).topk(3).indices.sort(-1).values
    assert not torch.equal(_choices(copy.deepcopy(block), x), exact)
    assert torch.equal(_choices(packed(block), x), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", "deepseek_v3", "granitemoe", "gpt_oss", "afmoe"]
)
def test_a_whole_block_has_the_bits_of_one_row(architecture: str, dtype: torch.dtype) -> None:
    """Scores are sigmoids or softmaxes, with groups and biases of the choice."""
    block = block_of(architecture, dtype)
    exact = in_float64(block)
    x = rows(70, dtype)

    def output(block: Any, x: Tensor) -> Tensor:
        found = block(x[None])
        return (found[0] if isinstance(found, tuple) else found).reshape(len(x), WIDTH)

    block = packed(block)
    together = output(block, x)
    alone = torch.cat([output(block, row[None]) for row in x])
    assert torch.equal(alone, together)
    assert_near(together, output(exact, x.double()), dtype)
