"""The rotation tables on the device. Each profile has a table with an id, so a batch can mix them.

The operator's configuration bounds the set of profiles (deployments x methods x tiers). The engine
therefore allocates room for all of them at start. A table is filled in when its profile is first
used, and is never removed. No table moves, so recorded steps (cuda_graphs.py) stay valid. Only
profiles that come later, by a reload on a CPU, may need more room: then all tables move.

Shapes: S = places of rotation tables, N = pages of the longest context, O = offsets in a page,
P = rotated pairs, T = positions, Q = offsets in a tile.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import RotationArrays
from ropewalk.rope import Frequencies, NativeRope, PositionMethod, Profile
from ropewalk.rope.angles import (
    Angles,
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


class LayerTables:
    """The tables of one layer type, with room for S of them; a table that is filled in moves none.

    The numbers of a place are undefined until it is filled.
    """

    def __init__(
        self, room: int, num_pages: int, page_size: int, num_pairs: int, device: torch.device
    ) -> None:
        def empty(rows: int) -> Angles:
            shape = room, rows, num_pairs
            return Angles(torch.empty(shape, device=device), torch.empty(shape, device=device))

        self.starts = empty(num_pages)  # [S, N, P], angles of each page's first position
        self.offsets = empty(page_size)  # [S, O, P], angles inside a page
        self.attention_factor = [1.0] * room  # [S]
        self.logn_len: list[int | None] = [None] * room  # [S], L of the log-n switch, None when off
        self.positions: dict[int, PositionMethod] = {}  # of the tables that have a method
        tile = empty(TILE)
        self._device_tensors = RotationTensors(
            self.starts.cos,
            self.starts.sin,
            self.offsets.cos,
            self.offsets.sin,
            tile.cos,
            tile.sin,
            torch.empty(room, device=device),
            torch.empty(room, device=device),
        )

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
        """Return the tables as the CPU kernel takes them; also those that are filled in later."""
        room, page_size, num_pairs = self.offsets.cos.shape
        by_pair = room, num_pairs, page_size
        arrays = RotationArrays(
            start_cos_SNP=self.starts.cos.numpy(),
            start_sin_SNP=self.starts.sin.numpy(),
            offset_cos_SPO=np.empty(by_pair, dtype=np.float32),
            offset_sin_SPO=np.empty(by_pair, dtype=np.float32),
            attention_factor_S=np.ones(room, dtype=np.float32),
            logn_S=np.zeros(room, dtype=np.float64),
        )
        for table_id in range(room):
            self._fill_arrays(arrays, table_id)
        return arrays

    @property
    def device_tensors(self) -> RotationTensors:
        """Return the tables as the GPU kernels take them."""
        return self._device_tensors

    @torch.inference_mode()
    def fill(
        self,
        table_id: int,
        starts: Angles,
        offsets: Angles,
        attention_factor: float,
        logn_len: int | None,
    ) -> None:
        """Fill a table's place with its angles [N, P] and [O, P], its factor and its log-n."""
        self.attention_factor[table_id], self.logn_len[table_id] = attention_factor, logn_len
        for places, angles in ((self.starts, starts), (self.offsets, offsets)):
            places.cos[table_id], places.sin[table_id] = angles.cos, angles.sin
        tensors = self._device_tensors
        longest = len(starts.cos) * len(offsets.cos)
        # If the context is shorter than a tile, then no key reads the rows after it.
        positions_T = torch.arange(TILE, device=starts.cos.device).clamp(max=longest - 1)
        tile = self.at(table_id, positions_T)
        tensors.tile_cos_SQP[table_id] = tile.cos[:, 0]
        tensors.tile_sin_SQP[table_id] = tile.sin[:, 0]
        tensors.squared_factor_S[table_id] = attention_factor * attention_factor
        tensors.logn_S[table_id] = _logn(logn_len)
        if "kernel_arrays" in self.__dict__:  # they were asked for
            self._fill_arrays(self.kernel_arrays, table_id)

    def _fill_arrays(self, arrays: RotationArrays, table_id: int) -> None:
        """Fill what a CPU kernel takes in another form; the angles of pages are the same memory."""
        arrays.offset_cos_SPO[table_id] = self.offsets.cos[table_id].T.numpy()
        arrays.offset_sin_SPO[table_id] = self.offsets.sin[table_id].T.numpy()
        arrays.attention_factor_S[table_id] = self.attention_factor[table_id]
        arrays.logn_S[table_id] = _logn(self.logn_len[table_id])


class RopeTables:
    """The owner of the tables: ids by profile, and layer tables by layer type."""

    def __init__(
        self,
        native: NativeRope,
        page_size: int,
        max_len: int,
        device: torch.device,
        room: int = 1,
    ) -> None:
        """Allocate `room` tables for contexts of up to `max_len` positions; none is filled."""
        self._native = native
        self._page_size = page_size
        self._num_pages = -(-max_len // page_size)
        self.device = device
        # Rises if all tables move in memory, or one with a position method comes: its sequences are
        # read by other kernels.
        self.generation = 0
        self._ids: dict[Profile, int] = {}
        self._room = max(1, room)
        self._layers = self._allocated(self._room)

    @property
    def num_tables(self) -> int:
        return len(self._ids)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return tuple(self._ids)

    @property
    def has_methods(self) -> bool:
        """Return whether a table has a position method."""
        return any(profile.positions is not None for profile in self._ids)

    @property
    def room(self) -> int:
        """Return the number of tables that have memory."""
        return self._room

    @property
    def max_len(self) -> int:
        """Return the number of positions that the tables cover, in whole pages."""
        return self._num_pages * self._page_size

    def id_of(self, profile: Profile) -> int:
        """Return the id of the profile's table, which is filled in on first use.

        All tables move if there is no room for another one.
        """
        if profile not in self._ids:
            table_id = len(self._ids)
            if table_id == self._room:
                self._move()
            self._fill(self._layers, table_id, profile)
            # Last, because an error before it leaves a table without its numbers.
            self._ids[profile] = table_id
            self.generation += profile.positions is not None
        return self._ids[profile]

    def layer(self, layer_type: str | None) -> LayerTables:
        """Return the tables of a layer type; None: layers that do not rotate."""
        return self._layers[layer_type]

    def _allocated(self, room: int) -> dict[str | None, LayerTables]:
        """Allocate the tables of every layer type; none is filled."""
        layers: dict[str | None, LayerTables] = {}
        for layer_type in (*self._native.tables, None):
            pairs = 0
            if layer_type is not None:
                pairs = len(self._native.tables[layer_type].frequencies().inv_freq_P)
            layers[layer_type] = LayerTables(
                room, self._num_pages, self._page_size, pairs, self.device
            )
        return layers

    def _move(self) -> None:
        """Double the room. An engine with the right `num_rope_tables` never does.

        The old tables are valid until the new ones are complete, so an error changes nothing.
        """
        room = 2 * self._room
        layers = self._allocated(room)
        for profile, table_id in self._ids.items():
            self._fill(layers, table_id, profile)
        self._room, self._layers = room, layers
        self.generation += 1

    def _fill(
        self, layers: Mapping[str | None, LayerTables], table_id: int, profile: Profile
    ) -> None:
        """Build the tables of one profile in their place."""
        if profile.positions is not None:
            profile.positions.check_pages(self._page_size)
        for layer_type, tables in layers.items():
            table = self._frequencies(layer_type, profile)
            inv_freq_P = table.inv_freq_P.to(self.device)
            is_scaled = layer_type == self._native.scaled_layer_type
            positions = profile.positions if is_scaled else None
            factor = 1.0 if positions is None else positions.attention_factor
            tables.fill(
                table_id,
                page_start_angles(inv_freq_P, self._num_pages, self._page_size),
                offset_angles(inv_freq_P, self._page_size),
                table.attention_factor * factor,
                profile.logn_len if is_scaled else None,
            )
            if positions is not None:
                tables.positions[table_id] = positions

    def _frequencies(self, layer_type: str | None, profile: Profile) -> Frequencies:
        if layer_type is None:
            return Frequencies(torch.empty(0), 1.0)
        table = self._native.tables[layer_type]
        if layer_type == self._native.scaled_layer_type:
            return table.frequencies(profile.scaling)
        return table.frequencies()


def _logn(length: int | None) -> float:
    return math.log(length) if length else 0.0
