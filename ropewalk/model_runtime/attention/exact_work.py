"""The work of a GPU's exact attention in one step: tiles of tokens, and pieces of their contexts.

A context is cut into pieces of one length, which begin at absolute positions. A tile is a few
tokens of one sequence. Its entries are runs of pieces. A tile whose only entry has all pieces adds
them itself. The pieces of other tiles are stored, and added in the same order by a second kernel.
So the runs change no bit, and are chosen for balance only (work_list.py).

Shapes: S = sequences, N = tiles, E = entries, F = fields of an entry, M = tokens whose pieces are
stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Place
from ropewalk.model_runtime.attention.work_list import (
    Rows,
    most_turns,
    piece_tiles,
    tokens_together,
)
from ropewalk.model_runtime.transfer import on_device
from ropewalk.rope import PositionMethod

PIECE_TILES = 8  # key tiles of a piece; the least run of the other list, too
# Sequence, first flat row, tokens, position of the first token, first piece, the piece after the
# last one, the slot of the first token's first piece (-1: none is stored), pieces of the tile.
FIELDS = 8
_MERGED = 3  # flat row, first slot, pieces


def aligned(num_slots: int) -> int:
    """Return as many slots or a few more, whose numbers begin at multiples of 16 bytes."""
    return max(1, -(-num_slots // 4)) * 4


class ExactCut(NamedTuple):
    """The parameters by which a layer cuts the contexts. Layers with equal ones share a list."""

    window: int | None  # keys that a query sees, itself included; None: all
    piece: int  # keys
    most_tokens: int  # of a tile
    num_places: int  # entries of one key head that run at the same time
    num_slots: int  # for the pieces of tokens

    def refilled(self, rows: Rows, methods: Mapping[int, PositionMethod]) -> NDArray[np.int32]:
        """Return the numbers of a captured step, in which every row is a sequence of its own."""
        num_tokens_S = tokens_together(rows, self.most_tokens, methods)
        leading = np.flatnonzero(num_tokens_S)
        tiles = _Tiles(leading, leading, num_tokens_S[leading], rows.position_S[leading])
        num_rows = len(num_tokens_S)
        num_entries = most_turns(num_rows) * self.num_places + 2 * num_rows
        return _numbers(tiles, self, num_entries, num_rows)


class _Tiles(NamedTuple):
    """Some tokens of one sequence each."""

    sequence_N: NDArray[np.int64]
    row_N: NDArray[np.int64]
    num_tokens_N: NDArray[np.int64]
    position_N: NDArray[np.int64]  # of the first token


@dataclass(frozen=True, slots=True)
class ExactWork:
    """The entries of a step, and the tokens whose pieces are added after them, on the device."""

    numbers: Tensor  # int32, all numbers, in one transfer
    entries_EF: Tensor  # a view of them; entries without a piece do nothing
    merged_M3: Tensor  # a view of them: flat row, first slot, and pieces (0: nothing to add)
    num_slots: int
    methods: Mapping[int, PositionMethod] = field(default_factory=dict)  # never one

    @classmethod
    def of(cls, places: Sequence[Place], cut: ExactCut, device: torch.device) -> Self:
        """Cut the tokens and contexts of a step, and send the list to the device.

        If all sequences have one token, the list can be refilled.
        """
        if all(each.num_tokens == 1 for each in places):
            position_S = np.array([each.first_position for each in places])
            numbers = cut.refilled(Rows(position_S, position_S, position_S < 0), {})
            num_merged, num_slots = len(places), cut.num_slots
        else:
            numbers, num_merged, num_slots = _launched_once(_tiles(places, cut.most_tokens), cut)
        at = len(numbers) - num_merged * _MERGED
        sent = on_device(numbers, device)
        entries_EF, merged_M3 = sent[:at].view(-1, FIELDS), sent[at:].view(-1, _MERGED)
        return cls(sent, entries_EF, merged_M3, num_slots)


def _tiles(places: Sequence[Place], most_tokens: int) -> _Tiles:
    """Cut the tokens of all sequences into tiles."""
    begin_S, num_S, position_S, _ = np.array(places, dtype=np.int64).T
    count_S = -(-num_S // most_tokens)
    sequence_N = np.repeat(np.arange(len(places)), count_S)
    nth_N = np.arange(len(sequence_N)) - (np.cumsum(count_S) - count_S)[sequence_N]
    first_N = nth_N * most_tokens
    return _Tiles(
        sequence_N,
        begin_S[sequence_N] + first_N,
        np.minimum(num_S[sequence_N] - first_N, most_tokens),
        position_S[sequence_N] + first_N,
    )


def _launched_once(tiles: _Tiles, cut: ExactCut) -> tuple[NDArray[np.int32], int, int]:
    """Return the numbers of a step that is not captured, and its merged tokens and slots.

    There is at least one of each, so that no step is the first one to launch a kernel.
    """
    runs = _runs(tiles, cut)
    is_stored_N = runs.slot_N >= 0
    num_merged = max(1, int(tiles.num_tokens_N[is_stored_N].sum()))
    num_slots = aligned(int((tiles.num_tokens_N * runs.pieces_N)[is_stored_N].sum()))
    return _numbers(tiles, cut, int(runs.count_N.sum()), num_merged), num_merged, num_slots


class _Runs(NamedTuple):
    first_N: NDArray[np.int64]  # piece
    pieces_N: NDArray[np.int64]
    count_N: NDArray[np.int64]  # entries
    slot_N: NDArray[np.int64]  # of the first token's first piece; -1: none is stored
    length: int  # pieces of an entry


def _runs(tiles: _Tiles, cut: ExactCut) -> _Runs:
    """Divide the pieces of each tile among entries, the longest contexts first."""
    _, _, num_tokens_N, position_N = tiles
    begin_N = np.zeros_like(position_N)
    if cut.window:
        begin_N = np.maximum(position_N + 1 - cut.window, 0)
    first_N = begin_N // cut.piece
    pieces_N = (position_N + num_tokens_N - 1) // cut.piece + 1 - first_N
    length = -(-piece_tiles(pieces_N * PIECE_TILES, cut.num_places) // PIECE_TILES)
    stored_N = np.where(pieces_N > length, pieces_N * num_tokens_N, 0)
    order_N = np.argsort(-pieces_N, kind="stable")
    after_N = np.empty_like(stored_N)
    after_N[order_N] = np.cumsum(stored_N[order_N])
    is_divided_N = (stored_N > 0) & (after_N <= cut.num_slots)
    count_N = np.where(is_divided_N, -(-pieces_N // length), 1)
    return _Runs(first_N, pieces_N, count_N, np.where(is_divided_N, after_N - stored_N, -1), length)


def _numbers(tiles: _Tiles, cut: ExactCut, num_entries: int, num_merged: int) -> NDArray[np.int32]:
    """Return the numbers of a list: entries [E, F], then the tokens that are merged [M, 3]."""
    first_N, pieces_N, count_N, slot_N, length = _runs(tiles, cut)
    tile_E = np.repeat(np.arange(len(count_N)), count_N)
    nth_E = np.arange(len(tile_E)) - (np.cumsum(count_N) - count_N)[tile_E]
    run_E = np.where(slot_N[tile_E] < 0, pieces_N[tile_E], length)
    begin_E = nth_E * length
    end_E = np.minimum(begin_E + run_E, pieces_N[tile_E])
    entries_EF = np.stack(
        [
            *(each[tile_E] for each in tiles),
            first_N[tile_E] + begin_E,
            first_N[tile_E] + end_E,
            np.where(slot_N[tile_E] < 0, -1, slot_N[tile_E] + begin_E),
            pieces_N[tile_E],
        ],
        axis=1,
    )
    order_E = np.argsort(begin_E - end_E, kind="stable")
    numbers = np.zeros(num_entries * FIELDS + num_merged * _MERGED, dtype=np.int32)
    numbers[: entries_EF.size] = entries_EF[order_E].ravel()
    merged_M3 = numbers[num_entries * FIELDS :].reshape(num_merged, _MERGED)
    stored = np.flatnonzero(slot_N >= 0)
    num_N = tiles.num_tokens_N[stored]
    tile_M = np.repeat(stored, num_N)
    nth_M = np.arange(len(tile_M)) - (np.cumsum(num_N) - num_N).repeat(num_N)
    merged_M3[: len(tile_M), 0] = tiles.row_N[tile_M] + nth_M
    merged_M3[: len(tile_M), 1] = slot_N[tile_M] + nth_M * pieces_N[tile_M]
    merged_M3[: len(tile_M), 2] = pieces_N[tile_M]
    return numbers
