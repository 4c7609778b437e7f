"""The bytes that a token takes in the cache; planning computes them without torch."""

from collections.abc import Mapping
from typing import Protocol

from ropewalk.model_runtime.page_groups import LayerShape


class NumberType(Protocol):
    """A number type of torch, or its name and size."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""


def bytes_per_token(layers: Mapping[int, LayerShape], dtype: NumberType) -> int:
    """Return the cache bytes of one position over all layers."""
    numbers = sum(
        layer.num_key_heads * (layer.key_dim + layer.value_dim) for layer in layers.values()
    )
    return numbers * dtype.itemsize
