"""The replacements for a GPU, in the order in which they recognise each other."""

from collections.abc import Sequence

from torch import nn

from model_runtime.gpu_layers.gated_block import fuse_gates
from model_runtime.gpu_layers.residual_layer import fuse_residuals
from model_runtime.gpu_layers.rms_norm import candidates
from model_runtime.layers.match_norm import replace_norms
from model_runtime.layers.merged_linear import join


def use_fewer_kernels(model: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Replace the modules of a patched model by others that launch fewer kernels, in place.

    `groups`: names of linears that read one tensor (merged_linear.shared_inputs finds them). A
    module with outputs of its own kind keeps its form.
    """
    join(model, groups)
    replace_norms(model, candidates)
    fuse_gates(model)
    fuse_residuals(model)
