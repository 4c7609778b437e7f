"""Mixtures get a step of one call, with the bits of their own forward, whatever routers choose."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.layers.experts.low_bit import LowBitExperts
from ropewalk.model_runtime.layers.experts.routing import expert_blocks
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers, restore
from ropewalk.model_runtime.layers.fused.mixtures import experts_product, stage_widths
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.low_bits.quantise import quantise_model
from ropewalk.model_runtime.tracing.operations import Leave, UntraceableError
from tests.checkpoints.expert_files import FILES, expert_file
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import checkpoint_of
from tests.doubles.tokens import byte_tokenizer
from tests.model_runtime.layers.test_fused_decoder import answers, forward_of

SIZES = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 96}


def _nothing(weight_EK: Tensor) -> None:
    """Change nothing: logits are random."""
    del weight_EK


def _twins(weight_EK: Tensor) -> None:
    """Let each expert tie with another."""
    weight_EK[4:] = weight_EK[:4]


# What a router's weights are; with zeros, all rows choose the first experts.
ROUTERS: dict[str, Callable[[Tensor], Any]] = {
    "random": _nothing,
    "zeros": torch.Tensor.zero_,
    "twins": _twins,
}
# Routers, and the experts of a row: with one choice, zeros send all rows to the first expert.
ROUTINGS = (("random", 3), ("zeros", 1), ("twins", 3), ("random", 8))
# Kernels differ by the number type and by floats or few bits, programs by architecture, and ways
# through a kernel by routing.
FLOATS, FEW = False, True
CASES = [
    *(("qwen3_moe", torch.float32, *each, FLOATS) for each in ROUTINGS),
    ("mixtral", torch.float32, "zeros", 1, FLOATS), ("mixtral", torch.bfloat16, "twins", 3, FLOATS),
    ("gpt_oss", torch.float32, "twins", 3, FLOATS), ("gpt_oss", torch.bfloat16, "zeros", 1, FLOATS),
    ("granitemoe", torch.float32, "random", 8, FLOATS),
    ("granitemoe", torch.bfloat16, "random", 3, FLOATS),
    ("qwen3_moe", torch.float32, "zeros", 1, FEW), ("gpt_oss", torch.float32, "random", 3, FEW),
    ("granitemoe", torch.bfloat16, "twins", 3, FEW), ("mixtral", torch.bfloat16, "random", 8, FEW),
]  # fmt: skip


def mixture(
    architecture: str, dtype: torch.dtype, router: str, num_choices: int, *, is_few: bool
) -> Checkpoint:
    """A checkpoint of a tiny mixture with such routers."""
    model: Any = tiny_model(architecture, **SIZES, num_experts_per_tok=num_choices)
    for block, _ in expert_blocks(model):
        own: Any = getattr(block, "gate", None) or block.router
        with torch.no_grad():
            ROUTERS[router](own.weight)
    model = in_dtype(model, dtype)
    if is_few:
        quantise_model(model, byte_tokenizer())
        assert any(isinstance(each, LowBitExperts) for each in model.modules())
    return checkpoint_of(model)


def assert_same_bits(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, several sequences and few rows have equal logits; some steps are one call."""
    forward = forward_of(checkpoint)
    assert isinstance(forward, DecoderLayers)
    assert forward.multiplying is not None
    calls, original = [], DecoderLayers._all_at_once

    def counted(*arguments: Any, with_head: bool) -> Any:
        calls.append(with_head)
        return original(*arguments, with_head=with_head)

    monkeypatch.setattr(DecoderLayers, "_all_at_once", counted)
    found = []
    for count in (1, 3):  # torch's own number stays that of the trial of products
        monkeypatch.setattr(DecoderLayers, "_num_threads", lambda *_, count=count: count)
        found.append(answers(checkpoint))
    assert len(calls) == 2 * len(found)
    restore(checkpoint.model)
    own = answers(checkpoint)
    for fused in found:
        assert all(map(torch.equal, fused, own))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_own_forward(
    monkeypatch: pytest.MonkeyPatch, case: tuple[str, torch.dtype, str, int, bool]
) -> None:
    """All rows to one expert, ties, a router of zeros, every expert; floats and few bits."""
    *others, is_few = case
    assert_same_bits(mixture(*others, is_few=is_few), monkeypatch)


@pytest.mark.parametrize(("case", "types"), FILES, ids=str)
def test_experts_in_the_bits_of_a_file_are_one_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str, types: tuple[str, str, str]
) -> None:
    """Types differ between the matrices of a layer, and attention has floats."""
    path = expert_file(tmp_path / "m.gguf", types, case=case, width=256)
    exact = load_checkpoint(path, device="cpu")
    assert_same_bits(exact, monkeypatch)
    rounding = load_checkpoint(path, device="cpu", activations="int8")
    assert rounding.report.bitwise
    assert_same_bits(rounding, monkeypatch)
    assert not all(map(torch.equal, answers(exact), answers(rounding)))


def test_a_config_that_asks_for_the_logits_of_routers_is_served() -> None:
    """Checkpoints of a training have it; their loss needs calls of the routers."""
    checkpoint = checkpoint_of(tiny_model("mixtral", **SIZES, output_router_logits=True))
    assert isinstance(forward_of(checkpoint), DecoderLayers)
    restore(checkpoint.model)
    assert len(answers(checkpoint)) > 1


def test_experts_of_another_number_type_than_the_rows_have_no_one_call() -> None:
    """The kernel would read their panels as the rows' numbers."""
    panels = [SimpleNamespace(packed_Q=np.zeros(4, np.float32))]
    experts = SimpleNamespace(panels=panels, num_between=64)
    mixture: Any = SimpleNamespace(experts=experts, num_choices=2, num_experts=8)
    assert stage_widths(mixture, 4) == (8, 128)
    with pytest.raises(UntraceableError, match="another number type"):
        stage_widths(mixture, 2)


def test_experts_of_two_kinds_have_no_one_call() -> None:
    """The one call has one product of experts, and the reason names both kinds."""

    def leave(*products: str) -> Leave:
        experts = SimpleNamespace(panels=[SimpleNamespace(product=each) for each in products])
        mixture: Any = SimpleNamespace(experts=experts)
        nothing: Any = None
        return Leave(nothing, nothing, nothing, nothing, mixture)

    assert experts_product([None]) is None
    assert experts_product([leave("few", "few"), None, leave("few", "few")]) == "few"
    with pytest.raises(UntraceableError, match="experts of floats and quantised ones"):
        experts_product([leave("few", "few"), leave("few", "floats")])
