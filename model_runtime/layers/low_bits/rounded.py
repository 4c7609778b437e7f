"""Products of a packed model whose rows of activations are rounded to eight bits."""

from functools import partial

import torch
from torch import nn

from ropewalk.model_runtime.cpu_kernels.low_bits.formats import FLOAT32
from ropewalk.model_runtime.cpu_kernels.low_bits.rounded_products import (
    RoundedProducts,
    rounding_of,
)
from ropewalk.model_runtime.layers.packed_linear import products_of


def round_activations(model: nn.Module, dtype: torch.dtype) -> bool:
    """Round the rows of all products with weights of few bits, in place.

    Returns whether the model has any. Products of floats and of experts stay as they are.
    """
    products = [each for each in products_of(model) if each.weights]
    formats = {panels.kind for product in products for panels in product.weights}
    if not formats - {FLOAT32}:
        return False
    rounding = rounding_of(formats, dtype)
    for product in products:
        product.round_rows(partial(RoundedProducts, rounding=rounding))
    return True
