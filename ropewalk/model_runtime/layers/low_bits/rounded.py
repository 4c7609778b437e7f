"""Products of a packed model whose rows of activations are rounded to eight bits."""

from functools import partial

import torch
from torch import nn

from ropewalk.model_runtime.cpu_kernels.experts.products import ExpertProduct
from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32
from ropewalk.model_runtime.cpu_kernels.low_bits.grouped.grouped_products import (
    GroupedProducts,
    rounding_of,
)
from ropewalk.model_runtime.layers.experts.packed import PackedExperts
from ropewalk.model_runtime.layers.packed_linear import products_of


def round_activations(model: nn.Module, dtype: torch.dtype) -> bool:
    """Round the rows of all products with weights of few bits, in place.

    Returns whether the model has any. Products of floats stay as they are.
    """
    products = [each for each in products_of(model) if each.weights]
    formats = {panels.kind for product in products for panels in product.weights}
    has_experts = _round_experts(model)
    if not formats - {FLOAT32}:
        return has_experts
    grouping = rounding_of(formats, dtype)
    for product in products:
        product.round_rows(partial(GroupedProducts, grouping=grouping))
    return True


def _round_experts(model: nn.Module) -> bool:
    """Round the rows of experts with weights of few bits; return whether there are any.

    Their rows are float32 in any model, and so is what lies between their two products.
    """
    packed = [each for each in model.modules() if isinstance(each, PackedExperts)]
    experts = [each for each in packed if each.is_low_bit]
    if not experts:
        return False
    formats = {kind for each in experts for panels in each.panels for kind in panels.formats}
    multiplying = rounding_of(formats, torch.float32).multiplying
    for each in experts:
        each.use(ExpertProduct(multiplying.multiply, multiplying.rows_for))
    return True
