"""Round the activations of a checked model, and measure how far that moves its answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.low_bits.executors import fp8_fault, round_to_fp8
from ropewalk.model_runtime.loading.low_bits.quantise import Distance, distance
from ropewalk.model_runtime.loading.low_bits.sizes import NEEDS_FEW_BITS, NEEDS_FP8, Activations
from ropewalk.model_runtime.loading.self_check import (
    PagedPrompts,
    SelfCheckReport,
    has_same_bits,
)
from ropewalk.model_runtime.probing.untouched import LONG_LEN
from ropewalk.model_runtime.runner.backends import has_cpu_kernels

_MOST_TOKENS = 128


@torch.inference_mode()
def with_rounded_rows(
    paged_prompts: Callable[[], PagedPrompts],
    prompts: PagedPrompts,
    report: SelfCheckReport,
    text_ids: Sequence[int],
    activations: Activations,
) -> tuple[PagedPrompts, SelfCheckReport, Distance]:
    """Let a checked model round its activations, in place, and measure what that changes.

    The self-check compared exact products with transformers' model, so only bits are checked again.
    Returns new prompts, the report with the bits found now, and the distance from exact activations
    over pieces of a text. Raises ModelError if no linear has weights in few bits.
    """
    text_ids = list(text_ids[:_MOST_TOKENS]) or prompts.ids.long
    before_TV = _text_logits(prompts, text_ids)
    round_rows(prompts.model, activations)
    prompts = paged_prompts()
    found = distance(before_TV, _text_logits(prompts, text_ids))
    report = replace(report, bitwise=report.bitwise and has_same_bits(prompts))
    return prompts, report, replace(found, origin="exact activations")


def round_rows(model: nn.Module, activations: Activations) -> None:
    """Let a packed model round its activations, in place.

    Raises ModelError if no linear has weights in few bits, or the device has no such products.
    """
    device = next(model.parameters()).device
    if activations == "fp8":
        fault = fp8_fault(device)
        if fault is not None:
            raise ModelError(fault)
        if not round_to_fp8(model):
            raise ModelError(NEEDS_FP8)
    else:
        if not has_cpu_kernels(device):
            raise ModelError("activations: int8 needs compiled kernels, and none serve here")
        from ropewalk.model_runtime.layers.low_bits.rounded import (  # noqa: PLC0415  # numba
            round_activations,
        )

        if not round_activations(model, next(model.parameters()).dtype):
            raise ModelError(NEEDS_FEW_BITS)


def _text_logits(prompts: PagedPrompts, text_ids: Sequence[int]) -> Tensor:
    """Return the logits after each token of a text, whose pieces are prompts of their own."""
    pieces = [text_ids[first : first + LONG_LEN] for first in range(0, len(text_ids), LONG_LEN)]
    return torch.cat([prompts.run([prompts.span(piece, 0)]) for piece in pieces])
