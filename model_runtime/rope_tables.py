"""The rotation tables on the device: one slot per profile, so a batch can mix them.

The set of profiles is bounded by what the operator configured (deployments x methods x tiers), so
slots are added when a profile is first used and never dropped.

Shapes: S = slots, N = pages of the longest context, O = offsets in a page, P = rotated pairs,
T = positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rope import (
    Angles,
    Frequencies,
    NativeRope,
    Profile,
    logn_scale,
    offset_angles,
    page_start_angles,
    position_angles,
)


@dataclass(frozen=True, slots=True)
class LayerTables:
    """Every profile's table for one kind of layer."""

    starts: Angles  # [S, N, P], angles of the pages' first positions
    offsets: Angles  # [S, O, P], angles inside a page
    attention_factor: tuple[float, ...]  # [S]
    logn_len: tuple[int | None, ...]  # [S], L of the log-n switch, None when off

    @property
    def num_pairs(self) -> int:
        """P."""
        return self.starts.cos.shape[-1]

    def at(self, slot: int, positions_T: Tensor) -> Angles:
        """Angles of one slot at absolute positions, [T, 1, P] (the 1 is for heads)."""
        angles = position_angles(
            Angles(self.starts.cos[slot], self.starts.sin[slot]),
            Angles(self.offsets.cos[slot], self.offsets.sin[slot]),
            positions_T,
        )
        return Angles(angles.cos[:, None], angles.sin[:, None])

    def logn_scale(self, slot: int, positions_T: Tensor) -> Tensor:
        """What the whole query is multiplied by, [T]."""
        logn_len = self.logn_len[slot]
        if logn_len is None:
            return torch.ones(len(positions_T), device=positions_T.device)
        return logn_scale(positions_T, logn_len)

    def kernel_arrays(self) -> tuple[Tensor, ...]:
        """What a compiled kernel takes: four tables, attention factors, ln(L) or 0."""
        logn = [math.log(length) if length else 0.0 for length in self.logn_len]
        return (
            self.starts.cos,
            self.starts.sin,
            self.offsets.cos,
            self.offsets.sin,
            torch.tensor(self.attention_factor, dtype=torch.float32),
            torch.tensor(logn, dtype=torch.float64),
        )


class RopeTables:
    """Owner of the tables; asked for a slot by profile, and for a layer's tables by type."""

    def __init__(
        self, native: NativeRope, page_size: int, max_len: int, device: torch.device
    ) -> None:
        self._native = native
        self._page_size = page_size
        self._num_pages = -(-max_len // page_size)
        self._device = device
        self._slots: dict[Profile, int] = {}
        self._layers: Mapping[str | None, LayerTables] = {}

    def slot(self, profile: Profile) -> int:
        """The profile's slot, made on first use."""
        if profile not in self._slots:
            self._slots[profile] = len(self._slots)
            self._layers = self._build()
        return self._slots[profile]

    def layer(self, layer_type: str | None) -> LayerTables:
        """The tables that layers of this type read; None: layers that do not rotate."""
        return self._layers[layer_type]

    def _build(self) -> Mapping[str | None, LayerTables]:
        types: list[str | None] = [*self._native.tables, None]
        return {layer_type: self._build_layer(layer_type) for layer_type in types}

    def _build_layer(self, layer_type: str | None) -> LayerTables:
        tables = [self._frequencies(layer_type, profile) for profile in self._slots]
        inv_freqs = [table.inv_freq_P.to(self._device) for table in tables]
        starts = [page_start_angles(table, self._num_pages, self._page_size) for table in inv_freqs]
        offsets = [offset_angles(table, self._page_size) for table in inv_freqs]
        scaled = layer_type == self._native.scaled_layer_type
        return LayerTables(
            _stack(starts),
            _stack(offsets),
            tuple(table.attention_factor for table in tables),
            tuple(profile.logn_len if scaled else None for profile in self._slots),
        )

    def _frequencies(self, layer_type: str | None, profile: Profile) -> Frequencies:
        if layer_type is None:
            return Frequencies(torch.empty(0), 1.0)
        table = self._native.tables[layer_type]
        if layer_type == self._native.scaled_layer_type:
            return table.frequencies(profile.scaling)
        return table.frequencies()


def _stack(angles: list[Angles]) -> Angles:
    return Angles(
        torch.stack([each.cos for each in angles]), torch.stack([each.sin for each in angles])
    )
