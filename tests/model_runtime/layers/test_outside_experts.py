"""Experts outside transformers' interface: answers in float64, and bits in any company."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.layers import packed_linear
from ropewalk.model_runtime.layers.experts import outside
from tests.checkpoints.tiny_models import in_dtype, tiny_model

_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the norm of all rows
CASES = [
    (architecture, dtype, has_zeros)
    for architecture in ("dbrx", "jetmoe")
    for dtype in _ROUNDING
    for has_zeros in (False, True)
]


def block_of(architecture: str, dtype: torch.dtype, *, has_zeros: bool) -> Any:
    """The feed-forward block of a layer; with a router of zeros, all rows choose the same."""
    model: Any = in_dtype(tiny_model(architecture), dtype)
    layer = model.transformer.blocks[0] if architecture == "dbrx" else model.model.layers[0]
    block = layer.ffn if architecture == "dbrx" else layer.mlp
    block.requires_grad_(requires_grad=False)
    if has_zeros:
        block.router.layer.weight.zero_()
    return block


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.inference_mode()
def test_rows_have_the_same_bits_alone_and_the_answers_of_float64(
    case: tuple[str, torch.dtype, bool],
) -> None:
    """An expert gets 1 to 60 rows, or none."""
    architecture, dtype, has_zeros = case
    block = block_of(architecture, dtype, has_zeros=has_zeros)
    exact = copy.deepcopy(block).double()
    holder = nn.ModuleList([block])
    packed_linear.pack(holder)
    packed_linear.replace_activations(holder)
    outside.pack(holder)
    x = torch.randn(1, 60, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    found: Tensor = block(x)
    expected = exact(x.double())
    assert (found - expected).norm() < _ROUNDING[dtype] * expected.norm()
    for rows in (slice(0, 1), slice(7, 12), slice(20, 53)):
        assert torch.equal(found[:, rows], block(x[:, rows]))
