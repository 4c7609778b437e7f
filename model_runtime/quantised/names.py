"""The names of the tensors of quantised weights."""

from collections.abc import Container

# Scales of activations and of the cache, which are served in the number type of the weights.
OF_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".activation_scale", ".input_global_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point"),
)
# Ends of names that say that a tensor belongs to a quantised weight.
_PARTS = (
    *(".scales", ".qscale_weight", ".g_idx", ".qzeros", ".absmax"),
    *("weight_scale", "weight_scale_inv", "weight_global_scale", "weight_zero_point"),
    *("weight_packed", "weight_shape", "weight_g_idx"),
)
# The same behind the name of a weight. Models have parameters with such names, too: Gemma 4's
# `router.per_expert_scale` is no scale of a `router.per_expert`.
_PARTS_OF_NAMES = (
    *("_scale", "_scale_inv", "_scales", "_global_scale", "_zero_point", "_packed", "_blocks"),
    *("_shape", "_g_idx"),
)
# The same, certain enough to refuse a checkpoint whose config says nothing.
UNSTATED = (".weight_scale", ".weight_scale_inv", ".qweight", ".weight_packed", ".weight.absmax")


def is_part(name: str, names: Container[str]) -> bool:
    """Return whether a tensor's name says that it belongs to a quantised weight."""
    if name.endswith((*_PARTS, *OF_ACTIVATIONS)):
        return True
    ends = [end for end in _PARTS_OF_NAMES if name.endswith(end)]
    return any(name.removesuffix(end) in names for end in ends)
