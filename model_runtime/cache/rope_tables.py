"""The rotation tables on the device. Each profile has a table with an id, so a batch can mix them.

The operator's configuration bounds the set of profiles (deployments x methods x tiers). Tables are
therefore added when a profile is first used and never removed.

Shapes: S = rotation tables, N = pages of the longest context, O = offsets in a page, P = rotated
pairs, T = positions, Q = offsets in a tile.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_runtime.cpu_kernels.kernel_arguments import RotationArrays
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

TILE = 64  # max keys that the GPU kernel rotates together, by their offsets in a tile


class RotationTensors(NamedTuple):
    """The tables of all profiles for the GPU kernels, float32, in the order of their arguments."""

    start_cos_SNP: Tensor  # of the angles of each page's first position
    start_sin_SNP: Tensor
    offset_cos_SOP: Tensor  # of the angles inside a page
    offset_sin_SOP: Tensor
    tile_cos_SQP: Tensor  # of the angles inside a tile
    tile_sin_SQP: Tensor
    squared_factor_S: Tensor  # the attention factor squared, because queries and keys both have it
    logn_S: Tensor  # ln(L) of the log-n switch; 0: off

    @property
    def pages(self) -> tuple[Tensor, ...]:
        """Return cosines and sines of page starts and of offsets."""
        return self[:4]


@dataclass(frozen=True)
class LayerTables:
    """The tables of all profiles for one layer type."""

    starts: Angles  # [S, N, P], angles of each page's first position
    offsets: Angles  # [S, O, P], angles inside a page
    attention_factor: tuple[float, ...]  # [S]
    logn_len: tuple[int | None, ...]  # [S], L of the log-n switch, None when off

    @property
    def num_pairs(self) -> int:
        """P."""
        return self.starts.cos.shape[-1]

    def at(self, table_id: int, positions_T: Tensor) -> Angles:
        """Return the angles of one table at absolute positions, [T, 1, P] (1 for the heads)."""
        angles = position_angles(
            Angles(self.starts.cos[table_id], self.starts.sin[table_id]),
            Angles(self.offsets.cos[table_id], self.offsets.sin[table_id]),
            positions_T,
        )
        return Angles(angles.cos[:, None], angles.sin[:, None])

    def logn_scale(self, table_id: int, positions_T: Tensor) -> Tensor:
        """Return the factor of the whole query, [T]."""
        logn_len = self.logn_len[table_id]
        if logn_len is None:
            return torch.ones(len(positions_T), device=positions_T.device)
        return logn_scale(positions_T, logn_len)

    @cached_property
    def kernel_arrays(self) -> RotationArrays:
        """Return the tables as the CPU kernel takes them."""
        logn = [math.log(length) if length else 0.0 for length in self.logn_len]
        return RotationArrays(
            start_cos_SNP=self.starts.cos.numpy(),
            start_sin_SNP=self.starts.sin.numpy(),
            offset_cos_SPO=np.ascontiguousarray(self.offsets.cos.transpose(1, 2).numpy()),
            offset_sin_SPO=np.ascontiguousarray(self.offsets.sin.transpose(1, 2).numpy()),
            attention_factor_S=np.array(self.attention_factor, dtype=np.float32),
            logn_S=np.array(logn, dtype=np.float64),
        )

    @cached_property
    def device_tensors(self) -> RotationTensors:
        """Return the tables as the GPU kernels take them."""
        longest = self.starts.cos.shape[1] * self.offsets.cos.shape[1]
        device = self.starts.cos.device
        # If the context is shorter than a tile, then no key reads the rows after it.
        positions_T = torch.arange(TILE, device=device).clamp(max=longest - 1)
        tile = [self.at(table_id, positions_T) for table_id in range(len(self.attention_factor))]
        squares = [factor * factor for factor in self.attention_factor]
        logn = [math.log(length) if length else 0.0 for length in self.logn_len]
        return RotationTensors(
            start_cos_SNP=self.starts.cos,
            start_sin_SNP=self.starts.sin,
            offset_cos_SOP=self.offsets.cos,
            offset_sin_SOP=self.offsets.sin,
            tile_cos_SQP=torch.stack([angles.cos[:, 0] for angles in tile]),
            tile_sin_SQP=torch.stack([angles.sin[:, 0] for angles in tile]),
            squared_factor_S=torch.tensor(squares, device=device),
            logn_S=torch.tensor(logn, device=device),
        )

    def with_table(self, other: "LayerTables") -> "LayerTables":
        """Return these tables followed by those of `other`."""
        return LayerTables(
            _joined(self.starts, other.starts),
            _joined(self.offsets, other.offsets),
            self.attention_factor + other.attention_factor,
            self.logn_len + other.logn_len,
        )


class RopeTables:
    """The owner of the tables: ids by profile, and layer tables by layer type."""

    def __init__(
        self, native: NativeRope, page_size: int, max_len: int, device: torch.device
    ) -> None:
        self._native = native
        self._page_size = page_size
        self._num_pages = -(-max_len // page_size)
        self.device = device
        self._ids: dict[Profile, int] = {}
        self._layers: dict[str | None, LayerTables] = {}

    @property
    def num_tables(self) -> int:
        """Return the number of tables. A new table moves all tables in memory."""
        return len(self._ids)

    def id_of(self, profile: Profile) -> int:
        """Return the id of the profile's table, which is built on first use."""
        if profile not in self._ids:
            self._ids[profile] = len(self._ids)
            for layer_type in [*self._native.tables, None]:
                made = self._make(layer_type, profile)
                before = self._layers.get(layer_type)
                self._layers[layer_type] = made if before is None else before.with_table(made)
        return self._ids[profile]

    def layer(self, layer_type: str | None) -> LayerTables:
        """Return the tables of a layer type; None: layers that do not rotate."""
        return self._layers[layer_type]

    def _make(self, layer_type: str | None, profile: Profile) -> LayerTables:
        """Build the tables of one profile."""
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
