"""The tensors of cached keys and values. Keys are stored unrotated and unscaled.

Shapes: N = pages, K = key heads, O = offsets in a page, D = key dimensions, V = value dimensions.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Span
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.eight_bits import CodeArrays, Scales
from ropewalk.model_runtime.cpu_kernels import huge_pages
from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Ints, PageArrays


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros for cached numbers. A CPU's take memory when they are written, not before.

    torch would write gigabytes at the start. Contexts are read from end to end, as weights are, so
    a CPU's lie in huge pages, too.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    numbers = torch.from_numpy(huge_pages.zeros(math.prod(shape) * dtype.itemsize))
    return numbers.view(dtype).view(shape)


class KVCache:
    """Pages of keys [N, K, D, O] and values [N, K, O, V] for every attention layer.

    `row_keys`: if True, the numbers of one key are contiguous in memory, else those of one
    dimension. The attention backend decides (`Backend.row_keys`). The tensor shapes are the same.
    `own_backend`: the attention backend, if it is not that of the device. `scales`: of each layer,
    if numbers are codes of eight bits.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        device: torch.device,
        *,
        row_keys: bool,
        own_backend: Any = None,
        scales: Mapping[int, Scales] | None = None,
    ) -> None:
        """Allocate the pages. Layers with the same place in the pages of groups share tensors."""
        self._own_backend = own_backend
        self.dtype = layout.number_type  # of numbers that are not in few bits
        self._scales = {} if scales is None else scales
        self.row_keys = row_keys
        self.layout = layout
        self._pages: dict[int, tuple[Tensor, Tensor]] = {}
        shared: dict[int, tuple[Tensor, Tensor]] = {}  # by the place of a layer in a page
        for index, layer in layout.layers.items():
            _, place = self.places[index]
            if place not in shared:
                pages, size = (num_pages, layer.num_key_heads), layout.page_size
                sides = (size, layer.key_dim) if row_keys else (layer.key_dim, size)
                keys = zeros((*pages, *sides), self.dtype, device)
                shared[place] = (
                    keys.transpose(2, 3) if row_keys else keys,
                    zeros((*pages, size, layer.value_dim), self.dtype, device),
                )
            self._pages[index] = shared[place]

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def num_groups(self) -> int:
        """Return the number of groups of layers with pages of their own."""
        return self.layout.groups.num_groups

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Return the group of each layer, and its place in a page."""
        return self.layout.places()

    @cached_property
    def group_L(self) -> Ints:
        """Return the group of each layer, by layer order, int64. On a CPU."""
        return np.array([self.places[index][0] for index in sorted(self._pages)])

    def own_backend(self) -> Any:
        """Return the attention backend that alone knows these pages; None: that of the device."""
        return self._own_backend

    def with_own_pages(self, batch: Batch, spans: Sequence[Span]) -> Batch:  # noqa: ARG002
        """Return the batch of the spans with what else a write to this cache needs."""
        return batch

    @property
    def num_pages(self) -> int:
        """N."""
        return len(next(iter(self._pages.values()))[0])

    @property
    def num_bytes(self) -> int:
        held = {id(each): each for pair in self._pages.values() for each in pair}
        return sum(each.nbytes for each in held.values())

    @cached_property
    def arrays(self) -> dict[int, PageArrays | CodeArrays]:
        """Return the pages as numpy arrays, by layer; bfloat16 as its bits. On a CPU."""
        from ropewalk.model_runtime.cpu_kernels.elementwise import (  # noqa: PLC0415  # imports numba
            as_numpy,
        )

        return {
            index: PageArrays(as_numpy(keys), as_numpy(values))
            for index, (keys, values) in self._pages.items()
        } | {
            index: CodeArrays(as_numpy(keys), as_numpy(values), self._scales[index])
            for index, (keys, values) in self._pages.items()
            if index in self._scales
        }

    @cached_property
    def addresses_LX(self) -> Ints:
        """Return the start addresses of keys and values by layer order, int64. On a CPU."""
        arrays = [self.arrays[index][:2] for index in sorted(self.arrays)]
        return np.array([[each.ctypes.data for each in pair] for pair in arrays], np.int64)

    def page_memory(self) -> list[NDArray[np.uint8]]:
        """Return the bytes of each page [N, bytes], keys then values of each layer. On a CPU.

        With groups of layers, a page has those of one group.
        """
        return [each.numpy() for each in self.page_bytes()]

    def page_bytes(self) -> list[Tensor]:
        """Return the bytes of each page, uint8 [N, bytes], keys then values of each layer."""
        every = (each for index in sorted(self._pages) for each in self._pages[index])
        tensors = {id(each): each for each in every}.values()
        # A page's numbers are contiguous in any layout, and whose they are does not matter here.
        return [
            torch.empty(0, dtype=torch.uint8, device=each.device)
            .set_(each.untyped_storage())
            .reshape(self.num_pages, -1)
            for each in tensors
        ]

    def scales(self, layer_idx: int) -> Scales | None:
        """Return the scales of a layer's codes; None: its numbers are no codes."""
        return self._scales.get(layer_idx)

    def pages(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys [N, K, D, O] and values [N, K, O, V]."""
        return self._pages[layer_idx]
