"""The rotation tables on the device: one slot per profile, so a batch can mix them.

The set of profiles is bounded by what the operator configured (deployments x methods x tiers), so
slots are added when a profile is first used and never dropped.

Shapes: S = slots, N = pages of the longest context, O = offsets in a page, P = rotated pairs,
T = positions.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
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

TILE = 64  # most keys that the GPU's kernel turns together, by their offsets in such a tile


@dataclass(frozen=True)
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

    @cached_property
    def kernel_arrays(self) -> tuple[Any, ...]:
        """What the CPU kernel takes: tables [S, N, P] and [S, P, O], factors, ln(L) or 0."""
        logn = [math.log(length) if length else 0.0 for length in self.logn_len]
        return (
            self.starts.cos.numpy(),
            self.starts.sin.numpy(),
            np.ascontiguousarray(self.offsets.cos.transpose(1, 2).numpy()),
            np.ascontiguousarray(self.offsets.sin.transpose(1, 2).numpy()),
            np.array(self.attention_factor, dtype=np.float32),
            np.array(logn, dtype=np.float64),
        )

    @cached_property
    def device_tensors(self) -> tuple[Tensor, ...]:
        """What the GPU's kernels take, [S, N, P], [S, O, P], [S, TILE, P], [S] and [S].

        The last two are the attention factor's square (queries and keys have it both) and ln(L),
        0 when log-n is off.
        """
        longest = self.starts.cos.shape[1] * self.offsets.cos.shape[1]
        device = self.starts.cos.device
        # No key of a context shorter than a tile reads the rows behind it.
        positions_T = torch.arange(TILE, device=device).clamp(max=longest - 1)
        tile = [self.at(slot, positions_T) for slot in range(len(self.attention_factor))]
        squares = [factor * factor for factor in self.attention_factor]
        logn = [math.log(length) if length else 0.0 for length in self.logn_len]
        return (
            self.starts.cos,
            self.starts.sin,
            self.offsets.cos,
            self.offsets.sin,
            torch.stack([angles.cos[:, 0] for angles in tile]),
            torch.stack([angles.sin[:, 0] for angles in tile]),
            torch.tensor(squares, device=device),
            torch.tensor(logn, device=device),
        )

    def with_slot(self, other: "LayerTables") -> "LayerTables":
        """These slots and those of `other` after them."""
        return LayerTables(
            _joined(self.starts, other.starts),
            _joined(self.offsets, other.offsets),
            self.attention_factor + other.attention_factor,
            self.logn_len + other.logn_len,
        )


class RopeTables:
    """Owner of the tables; asked for a slot by profile, and for a layer's tables by type."""

    def __init__(
        self, native: NativeRope, page_size: int, max_len: int, device: torch.device
    ) -> None:
        self._native = native
        self._page_size = page_size
        self._num_pages = -(-max_len // page_size)
        self.device = device
        self._slots: dict[Profile, int] = {}
        self._layers: dict[str | None, LayerTables] = {}

    @property
    def num_slots(self) -> int:
        """How many profiles have one. With a new one, all tables move in memory."""
        return len(self._slots)

    def slot(self, profile: Profile) -> int:
        """The profile's slot, made on first use."""
        if profile not in self._slots:
            self._slots[profile] = len(self._slots)
            for layer_type in [*self._native.tables, None]:
                made = self._make(layer_type, profile)
                before = self._layers.get(layer_type)
                self._layers[layer_type] = made if before is None else before.with_slot(made)
        return self._slots[profile]

    def layer(self, layer_type: str | None) -> LayerTables:
        """The tables that layers of this type read; None: layers that do not rotate."""
        return self._layers[layer_type]

    def _make(self, layer_type: str | None, profile: Profile) -> LayerTables:
        """One slot."""
        table = self._frequencies(layer_type, profile)
        inv_freq_P = table.inv_freq_P.to(self.device)
        starts = page_start_angles(inv_freq_P, self._num_pages, self._page_size)
        offsets = offset_angles(inv_freq_P, self._page_size)
        is_scaled = layer_type == self._native.scaled_layer_type
        return LayerTables(
            Angles(starts.cos[None], starts.sin[None]),
            Angles(offsets.cos[None], offsets.sin[None]),
            (table.attention_factor,),
            (profile.logn_len if is_scaled else None,),
        )

    def _frequencies(self, layer_type: str | None, profile: Profile) -> Frequencies:
        if layer_type is None:
            return Frequencies(torch.empty(0), 1.0)
        table = self._native.tables[layer_type]
        if layer_type == self._native.scaled_layer_type:
            return table.frequencies(profile.scaling)
        return table.frequencies()


def _joined(first: Angles, second: Angles) -> Angles:
    return Angles(torch.cat((first.cos, second.cos)), torch.cat((first.sin, second.sin)))
