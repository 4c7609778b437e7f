"""The self-check in its full length: what a load compares with the untouched model, and when.

A load has four points at which something can be compared: before the patch, after it, after the
modules were replaced by those with kernels, and once a program serves. `KnownCheck` has the same
methods for a model that an earlier start has checked.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.loading.install_forward import AnyForward, install_forward
from ropewalk.model_runtime.loading.low_bits.quantise import Distance
from ropewalk.model_runtime.loading.low_bits.rounding import with_rounded_rows
from ropewalk.model_runtime.loading.low_bits.sizes import Activations
from ropewalk.model_runtime.loading.self_check import (
    PagedPrompts,
    SelfCheckReport,
    check,
    check_structure,
)
from ropewalk.model_runtime.probing.untouched import (
    PromptIds,
    original_logits,
    original_structure,
)
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.rope import NativeRope


class FullCheck:
    """Compares a model with what it was before it was patched."""

    report: SelfCheckReport
    rounding: Distance | None = None  # of rounded activations from exact ones

    def __init__(
        self, model: nn.Module, native: NativeRope, ids: PromptIds, text_ids: Sequence[int]
    ) -> None:
        """Run the untouched model, with random numbers and with its weights. Raises ModelError.

        `text_ids`: tokens of the text over which rounded activations are measured.
        """
        self._native, self._text_ids = native, text_ids
        self._structure = original_structure(model, native)
        self._original = original_logits(model, native, ids)

    def compare_structure(
        self,
        model: nn.Module,
        plans: Mapping[int, LayerPlan],
        states: Mapping[int, StateShape],
    ) -> None:
        """Compare the patched model, with random numbers. Raises ModelError."""
        check_structure(model, plans, self._native, self._structure, states)

    def compare_products(self, paged_prompts: Callable[[], PagedPrompts]) -> None:
        """Compare the model with its kernels. Raises ModelError."""
        self._paged_prompts, self._prompts = paged_prompts, paged_prompts()
        self.report = check(self._prompts, self._original)

    def round_rows(self, _model: nn.Module, activations: Activations) -> None:
        """Let the packed model round its activations, in place. Raises ModelError."""
        self._prompts, self.report, self.rounding = with_rounded_rows(
            self._paged_prompts, self._prompts, self.report, self._text_ids, activations
        )

    def install(self, _model: nn.Module, forward: AnyForward) -> bool:
        """Install the model's program if it has the same logits; return whether it is."""
        return install_forward(self._prompts, forward, self._original.threshold) is None
