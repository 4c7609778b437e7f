"""The layout of a model's experts and routers for a CPU, in place.

Shapes: E = experts, K = inputs, N = outputs, W = outputs with padding to whole panels, Q = elements
of packed memory.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.experts.products import ExpertPanels, ExpertProduct
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import FLOAT32, PANEL, own_panels
from ropewalk.model_runtime.layers.experts.low_bit import LowBitExperts
from ropewalk.model_runtime.layers.experts.mixture import mixture_of, router_product
from ropewalk.model_runtime.layers.experts.packed import PackedExperts
from ropewalk.model_runtime.layers.experts.routing import expert_blocks, rules_of
from ropewalk.model_runtime.layers.joined_linears import placeholder
from ropewalk.model_runtime.layers.packed_product import DTYPES

if TYPE_CHECKING:
    from ropewalk.model_runtime.cpu_kernels.low_bits.products import LowBits


def pack(model: nn.Module, dtype: torch.dtype) -> None:
    """Lay out all experts and routers that run under the rules of `routing.py`, in place.

    `dtype` is the number type of rows.
    """
    low = [each for each in model.modules() if isinstance(each, LowBitExperts)]
    kernels = _low_bit_kernels(low, dtype) if low else None
    for block, names in expert_blocks(model):
        rules = rules_of(block)
        if rules is None:
            continue
        for name in names:
            experts: Any = getattr(block, name)
            if isinstance(experts, LowBitExperts):
                setattr(block, name, _low_bit_packed(experts, kernels))
            elif experts.down_proj.dtype in DTYPES and not experts.has_post_expert_norm:
                setattr(block, name, _packed(experts))
        for weight in rules.weights:
            rules.products[id(weight)] = router_product(weight, None)
        if len(names) == 1:
            mixture = mixture_of(block, getattr(block, names[0]), rules, dtype)
            block.forward = block.forward if mixture is None else mixture
    _spare_router_logits(model)


def _spare_router_logits(model: nn.Module) -> None:
    """Unset `output_router_logits` in the configs of the model, in place.

    Hooks of the routers would collect a loss, which serving does not use.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False  # type: ignore[union-attr]


def _low_bit_kernels(experts: Sequence[LowBitExperts], dtype: torch.dtype) -> "LowBits":
    """Return the kernels of all formats; models without them do not import these kernels."""
    from ropewalk.model_runtime.cpu_kernels.low_bits.products import LowBits  # noqa: PLC0415

    matrices = [matrix for each in experts for matrix in each.matrices.values()]
    kinds = {part.kind for each in matrices for parts in each.parts_E for part in parts}
    return LowBits(kinds, dtype, has_float_rows=True)


def _low_bit_packed(experts: LowBitExperts, kernels: Any) -> PackedExperts:
    """Return the experts with a table of their panels; nothing is copied."""
    own: Any = experts._original[0]  # noqa: SLF001
    first = experts.first_name
    num_parts = len(experts.matrices[first].parts_E[0])
    is_mixed = experts.has_gate and num_parts == 1
    panels = (
        _low_bit_panels(experts, first, kernels, is_mixed=is_mixed),
        _low_bit_panels(experts, "down_proj", kernels),
    )
    _free(own)
    return PackedExperts(own, *panels, experts.matrices["down_proj"].parts_E[0][0].num_outputs)


def _low_bit_panels(
    experts: LowBitExperts, name: str, kernels: Any, *, is_mixed: bool = False
) -> ExpertPanels:
    matrix = experts.matrices[name]
    table = np.stack([np.concatenate([part.table() for part in parts]) for parts in matrix.parts_E])
    num_experts, num_panels, _ = table.shape
    num_parts = len(matrix.parts_E[0])
    bias_EW = _biases(experts, name, 2 if is_mixed else num_parts, is_mixed=is_mixed)
    return ExpertPanels(
        ExpertProduct(kernels.multiplying.multiply),
        matrix.num_inputs,
        num_panels,
        matrix.num_bytes // (num_experts * num_panels),
        np.empty(0, np.float32),
        0,
        table.ctypes.data,
        table[0].nbytes,
        bias_EW,
        owner=(table, matrix),
        formats=frozenset(part.kind for parts in matrix.parts_E for part in parts),
    )


def _packed(experts: Any) -> PackedExperts:
    """Return the experts in panels; their own weights are freed."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    made = PackedExperts(
        experts,
        _float_panels(experts, first, num_parts=2 if experts.has_gate else 1),
        _float_panels(experts, "down_proj", num_parts=1),
        experts.down_proj.shape[2 if experts.is_transposed else 1],
    )
    _free(experts)
    return made


def _free(experts: nn.Module) -> None:
    """Free the parameters of a module, which may be views of a mapped file."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        setattr(experts, name, placeholder(parameter))


def _float_panels(experts: Any, name: str, *, num_parts: int) -> ExpertPanels:
    """Copy a matrix of all experts into panels, one expert at a time.

    `num_parts`: 2 if outputs are gates and ups, which get the same number of panels.
    """
    weight_E = getattr(experts, name).detach()
    num_experts = len(weight_E)
    is_mixed = num_parts == 2 and not experts.is_concatenated
    packed_EQ: Any = None
    for index, weight in enumerate(weight_E):
        rows_NK = weight.t() if experts.is_transposed else weight
        panels = own_panels(padded(rows_NK, num_parts, is_mixed=is_mixed), None)
        if packed_EQ is None:
            packed_EQ = np.empty((num_experts, panels.packed_Q.size), panels.packed_Q.dtype)
        packed_EQ[index] = panels.packed_Q
    return ExpertPanels(
        ExpertProduct(FLOAT32.multiply),
        panels.num_inputs,
        panels.num_panels,
        packed_EQ[0].nbytes // panels.num_panels,
        packed_EQ.reshape(-1),
        packed_EQ.shape[1],
        panels.layout,
        0,
        _biases(experts, name, num_parts, is_mixed=is_mixed),
    )


def _biases(experts: Any, name: str, num_parts: int, *, is_mixed: bool) -> Any:
    """Return the biases of a matrix in float32, [E, W]; [E, 0] if there are none."""
    if not experts.has_bias:
        return np.empty((len(experts.down_proj), 0), np.float32)
    biases: Iterable[Tensor] = getattr(experts, f"{name}_bias").detach().float()
    return np.stack([padded(each, num_parts, is_mixed=is_mixed).numpy() for each in biases])


def padded(outputs_NX: Tensor, num_parts: int, *, is_mixed: bool) -> Tensor:
    """Pad outputs, [N, ...] -> [W, ...], so that each part is whole panels.

    `is_mixed`: outputs of both parts take turns, and only the last ones are padding.
    """
    if is_mixed:
        return torch.cat([outputs_NX, _zeros(outputs_NX, -len(outputs_NX) % (num_parts * PANEL))])
    parts = outputs_NX.chunk(num_parts)
    pieces = ((part, _zeros(part, -len(part) % PANEL)) for part in parts)
    return torch.cat(list(chain.from_iterable(pieces)))


def _zeros(like: Tensor, count: int) -> Tensor:
    return like.new_zeros(count, *like.shape[1:])
