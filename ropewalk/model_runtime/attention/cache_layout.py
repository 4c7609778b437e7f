"""The layout of a model's cache: the layers of a page and of a slot, their format, and their bytes.

Plan, engine, stores and reports take their numbers from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ropewalk.model_runtime.attention.quantised.page_format import (
    EXACT,
    FIXED8,
    FORMATS,
    ROUNDED,
    quantises,
)
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.page_groups import ONE_GROUP, LayerShape, PageGroups, group_layers
from ropewalk.model_runtime.state_shape import StateShape


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What the cache of a model keeps of each token, and of each sequence.

    Bytes are those of all ranks, and each rank has the layers with its part of their heads.
    """

    layers: Mapping[int, LayerShape]  # with keys and values, of one rank
    dtype: torch.dtype  # of the model
    page_size: int  # positions of a page
    format: str = EXACT  # kv_cache_dtype
    groups: PageGroups = ONE_GROUP  # of layers that share pages
    states: Mapping[int, StateShape] = field(default_factory=dict)  # of layers without keys
    num_ranks: int = 1
    why_whole: str | None = None  # why layers with a window keep all tokens; None: they do not

    def with_windows(self, windows: Mapping[int, int | None], max_len: int) -> "CacheLayout":
        """Return the layout in which layers hold their window only, if they can.

        `windows`: keys that each layer reads. Those of `max_len` or more count as none.
        """
        groups, reason = group_layers(windows, self.layers, max_len)
        if self.states and (groups, reason) != (ONE_GROUP, None):
            groups, reason = ONE_GROUP, "its other layers keep states"
        return replace(self, groups=groups, why_whole=reason)

    def check(self) -> None:
        """Raise ModelError if the model has no pages in the format."""
        if self.format not in {EXACT, FIXED8} and self.dtype == torch.float16:
            raise ModelError(
                f"kv_cache_dtype {self.format} needs the dtype float32 or bfloat16, and the "
                "model's is float16"
            )
        if self.quantises:
            FORMATS[self.format].check(self.layers)

    @property
    def quantises(self) -> bool:
        """Return whether full pages are held in few bits (docs/design/kv-cache.md)."""
        return quantises(self.format)

    @property
    def number_type(self) -> torch.dtype:
        """Return the number type of keys and values that are not in few bits."""
        own = {ROUNDED: torch.bfloat16, FIXED8: torch.int8}
        return own.get(self.format, self.dtype)

    @property
    def rounds(self) -> bool:
        """Return whether the model's numbers are rounded when they are cached."""
        return self.number_type != self.dtype

    @property
    def layers_of_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each group, in the order of their places in its pages."""
        groups = self.groups
        return (tuple(sorted(self.layers)),) if groups == ONE_GROUP else groups.layers

    @property
    def page_layers(self) -> tuple[int, ...]:
        """Return the layers of the group with the most: a page has a place for each."""
        return max(self.layers_of_groups, key=len)

    def places(self) -> dict[int, tuple[int, int]]:
        """Return the group of each layer, and its place in the group's pages."""
        return {
            layer: (group, place)
            for group, layers in enumerate(self.layers_of_groups)
            for place, layer in enumerate(layers)
        }

    @property
    def exact_bytes(self) -> int:
        """Return the bytes of a token's keys and values in the model's numbers."""
        return self.num_ranks * sum(map(self._exact_bytes, self.layers.values()))

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token in all layers, with places that no layer has, rounded up."""
        num_bytes = self.exact_bytes // self.dtype.itemsize * self.number_type.itemsize
        if self.quantises:
            num_bytes = -(
                -FORMATS[self.format].page_bytes(self.layers, self.page_size) // self.page_size
            )
        num_places = len(self.page_layers) * self.groups.num_groups
        return -(-num_bytes * num_places // len(self.layers))

    @property
    def bytes_beyond_windows(self) -> int:
        """Return the bytes of a token that no layer with a window reads any more."""
        return self.token_bytes // self.groups.num_groups * self.groups.windows.count(None)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page, of one group of layers."""
        return self.token_bytes * self.page_size // self.groups.num_groups

    @property
    def tail_bytes(self) -> int:
        """Return the bytes of a sequence's tail page in all layers; 0 if no page is quantised."""
        return self.exact_bytes * self.page_size if self.quantises else 0

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a staged page, which is of one layer; 0 if no page is quantised."""
        return self.page_size * max(map(self._exact_bytes, self.layers.values())) * self.quantises

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a sequence's states in all layers; 0 without such layers."""
        return sum(each.num_bytes for each in self.states.values())

    def _exact_bytes(self, layer: LayerShape) -> int:
        return layer.num_key_heads * (layer.key_dim + layer.value_dim) * self.dtype.itemsize
