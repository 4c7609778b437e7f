"""Replace the modules of a patched model by those with kernels for a CPU.

The imports of layers are inside of functions, because layers import numba, which a GPU does not
need.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.layers.experts.low_bit import has_experts
from ropewalk.model_runtime.layers.match_norm import replace_norms
from ropewalk.model_runtime.loading.files.pretrained import leave_file
from ropewalk.model_runtime.runner.backends import has_cpu_kernels

if TYPE_CHECKING:
    from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers
    from ropewalk.model_runtime.layers.fused.program import Program

BY_TORCH = "torch"  # products, if no compiled kernels serve the device


class Division(Protocol):
    """One rank's share of a model (parallel/division.py). All ranks make the same calls."""

    def read_dtype(self, stored: torch.dtype | None, served: torch.dtype) -> torch.dtype:
        """Return the number type in which files are read; `stored` is the files' own."""

    def leave_in_file(
        self, model: nn.Module, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Return the model on the device, with the weights to divide still in their files."""

    def divide(self, model: nn.Module) -> None:
        """Cut the model's linears to the rank's outputs, in place."""

    def note_products(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        """Look at the products of the linears, which may be packed."""


def expected_products(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return the layout and products that weights will have, before they are loaded.

    The second word is the type of the numbers in which weights of few bits are multiplied.
    """
    if not has_cpu_kernels(device):
        return BY_TORCH, "float32"
    from ropewalk.model_runtime.cpu_kernels.trials import (  # noqa: PLC0415
        multiplies_pairs,
    )
    from ropewalk.model_runtime.layers.packed_linear import (  # noqa: PLC0415
        described,
    )
    from ropewalk.model_runtime.layers.way_trial import choose_way  # noqa: PLC0415

    low_bits = "bfloat16" if multiplies_pairs(dtype) else "float32"
    return described([choose_way(dtype)], dtype), low_bits


def exact_products(*, has_few_bits: bool) -> str:
    """Return how weights are multiplied with exact_batches on a GPU, for the banner."""
    widened = ", few bits widened for each product (slow)" if has_few_bits else ""
    return f"Triton, by the weights' shapes alone{widened}"


def rule_experts(model: nn.Module, division: Division | None) -> bool:
    """Let routers follow the rules of a CPU, in place; return whether the model has experts."""
    is_on_cpu = division is None and has_cpu_kernels(next(model.parameters()).device)
    if is_on_cpu and has_experts(model):
        from ropewalk.model_runtime.layers.experts.routing import (  # noqa: PLC0415
            rule,
        )

        rule(model)
        return True
    return False


def pack(
    model: nn.Module,
    plans: Mapping[int, LayerPlan],
    division: Division | None,
    *,
    is_ruled: bool,
) -> "Program | None":
    """Replace modules by those with kernels for a CPU, in place; return the model's program.

    None: a part of the model has no kernel, or it is divided, and gathers between products.
    """
    from ropewalk.model_runtime.layers import packed_linear  # noqa: PLC0415
    from ropewalk.model_runtime.layers.fused.decoder import program_or_none  # noqa: PLC0415
    from ropewalk.model_runtime.layers.rms_norm import cpu_candidates  # noqa: PLC0415

    dtype = next(model.parameters()).dtype
    packed_linear.replace_activations(model)
    if is_ruled:
        from ropewalk.model_runtime.layers.experts import lay_out  # noqa: PLC0415

        lay_out.pack(model, dtype)
    if division is None:
        from ropewalk.model_runtime.layers.experts import outside  # noqa: PLC0415

        outside.pack(model)
    replace_norms(model, cpu_candidates)
    program = program_or_none(model, plans) if division is None else None
    packed_linear.pack(model, program.linears() if program is not None else ())
    if division is not None:
        division.note_products(model, dtype, torch.device("cpu"))
    leave_file(model)
    return program


def decoder_of(
    model: nn.Module, plans: Mapping[int, LayerPlan], program: "Program"
) -> "DecoderLayers":
    """Return the forward of a packed model by its program."""
    from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers  # noqa: PLC0415

    return DecoderLayers(model, program, plans)


def products_text(model: nn.Module, dtype: torch.dtype) -> str:
    from ropewalk.model_runtime.layers.packed_linear import products_text  # noqa: PLC0415

    return products_text(model, dtype)
