"""The tensors of a cache whose full pages are quantised.

Shapes: N = quantised pages, X = tail pages, K = key heads, R = bytes of a record, E = numbers of a
tail page of one head.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Span
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache, zeros
from ropewalk.model_runtime.attention.quantised.own_pages import LayerPages, own_pages
from ropewalk.model_runtime.attention.quantised.page_format import FORMATS
from ropewalk.model_runtime.attention.quantised.torch_backend import QuantisedTorchAttention

_CPU = torch.device("cpu")


class QuantisedCache(KVCache):
    """Quantised pages [N, K, R] and tail pages [X, K, E] for every attention layer.

    `pages` and `arrays` return them in this order. `dtype` is that of the tail pages.
    `row_keys`: as in `KVCache`, of tail and staged pages. Records are the same on any device.
    With groups of layers, layers share quantised pages as in `KVCache`. Tail pages are never
    shared.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        *,
        num_tails: int,
        has_kernels: bool = True,
    ) -> None:
        """Allocate the pages. Raises ModelError if a layer has no such pages.

        `has_kernels`: whether the compiled kernels of a CPU read and write them.
        """
        layout.check()
        self._has_kernels = has_kernels
        self.row_keys = False
        self.num_tails = num_tails
        self.form = FORMATS[layout.format]
        self.layout, self.dtype = layout, layout.number_type
        self._scales = {}
        self._pages = {}
        self.most_numbers = 0
        shared: dict[int, Tensor] = {}  # by the place of a layer in a page
        for index, layer in layout.layers.items():
            num_heads, (_, place) = layer.num_key_heads, self.places[index]
            if place not in shared:
                shape = num_pages, num_heads, self.form.record_bytes(layer, self.page_size)
                shared[place] = zeros(shape, torch.uint8, _CPU)
            numbers = self.page_size * (layer.key_dim + layer.value_dim)
            tails = zeros((num_tails, num_heads, numbers), self.dtype, _CPU)
            self._pages[index] = shared[place], tails
            self.most_numbers = max(self.most_numbers, num_heads * numbers)

    def own_backend(self) -> Any:
        """Return the backend of quantised pages."""
        if not self._has_kernels:
            return QuantisedTorchAttention
        from ropewalk.model_runtime.attention.quantised.cpu_backend import (  # noqa: PLC0415  # numba
            QuantisedCpuAttention,
        )

        return QuantisedCpuAttention

    def with_own_pages(self, batch: Batch, spans: Sequence[Span]) -> Batch:
        """Return the batch of the spans with the own page of each token."""
        return replace(batch, own_pages=own_pages(spans, self))

    def sides(self, num_heads: int, key_dim: int, value_dim: int) -> tuple[int, ...]:
        """Return the sizes of a layer's records, as the kernels take them."""
        form = self.form
        bits, groups = (form.key_bits, form.value_bits), form.value_groups(value_dim)
        return num_heads, key_dim, value_dim, self.page_size, *bits, groups

    @cached_property
    def arrays(self) -> dict[int, LayerPages]:  # type: ignore[override]
        """Return the pages as numpy arrays, by layer."""
        from ropewalk.model_runtime.cpu_kernels.elementwise import (  # noqa: PLC0415  # imports numba
            as_numpy,
        )

        found = {}
        for index, (records, tails) in self._pages.items():
            layer = self.layout.layers[index]
            sides = self.sides(layer.num_key_heads, layer.key_dim, layer.value_dim)
            found[index] = LayerPages(as_numpy(records), as_numpy(tails), sides)
        return found

    @cached_property
    def addresses_LX(self) -> NDArray[np.int64]:
        """Return the addresses of quantised and of tail pages by layer order, bits and groups."""
        form, rows = self.form, []
        for index in sorted(self._pages):
            groups = form.value_groups(self.layout.layers[index].value_dim)
            addresses = (each.data_ptr() for each in self._pages[index])
            rows.append([*addresses, form.key_bits, form.value_bits, groups])
        return np.array(rows, np.int64)

    def page_bytes(self) -> list[Tensor]:
        """Return the bytes of quantised pages, uint8 [N, bytes], layer by layer of their group."""
        every: list[Tensor] = [self._pages[index][0] for index in sorted(self._pages)]
        quantised = {id(each): each for each in every}.values()
        return [each.flatten(1) for each in quantised]
