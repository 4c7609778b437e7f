"""The work of the GPU's decode attention in one step, as a list of pieces of the contexts.

A step's contexts may differ a hundredfold in length. If a program read a context, or a fixed share
of it, then all others would wait for the longest one. So every context is cut into pieces of one
length, which follows from the total length and from how many programs run at once. The pieces are
taken from the list in order, the longest first, by whichever processor is free.

The host makes the list from lengths that it knows. Its size depends only on the number of
sequences, so a captured step reads it at a fixed address (cuda_graphs.py).

Shapes: S = sequences, R = key ranges of a sequence, E = entries of a list, N = contexts to cut,
P = pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runtime.transfer import fill, on_device

_LEAST_TILES = 8  # of a piece; with fewer, the partial outputs are not small beside the keys
# Pieces of full length that a place may take one after the other. More balance better, but every
# captured step has an entry for each.
_MOST_TURNS = 3
_BALANCED = 1.05  # a longest load of this times the mean is not worth shorter pieces
_FIELDS = 4  # sequence, begin, end, slot


class Cut(NamedTuple):
    """The parameters by which a layer cuts the contexts. Layers with equal ones share a list."""

    window: int | None  # keys that a query sees, itself included; None: all
    tile: int  # keys that a program reads at once; a piece begins at a multiple of it
    num_places: int  # pieces of one key head that run at the same time


@dataclass(frozen=True, slots=True)
class WorkList:
    """The pieces of a step's contexts on the device. Keys are counted by their place in the pages.

    An entry is a piece: sequence, first key, the key after the last one, and the slot of its
    partial result. Entries without a key follow those with keys.
    """

    numbers: Tensor  # int32, all numbers, in one transfer
    entries_RE4: Tensor  # a view of them
    pieces_S2: Tensor  # a view of them: first slot and number of pieces of each sequence
    most_pieces: int  # of a sequence, for any lengths
    tile: int  # of the cut

    @classmethod
    def of(
        cls, begin_RS: NDArray[np.int64], end_RS: NDArray[np.int64], cut: Cut, device: torch.device
    ) -> Self:
        """Cut the ranges, and send the list to the device. A range without keys has no piece."""
        num_ranges, num_sequences = begin_RS.shape
        numbers = on_device(_numbers(begin_RS, end_RS, cut), device)
        at = numbers.numel() - 2 * num_sequences
        return cls(
            numbers,
            numbers[:at].view(num_ranges, -1, _FIELDS),
            numbers[at:].view(num_sequences, 2),
            _most_turns(num_ranges * num_sequences) * cut.num_places + num_ranges,
            cut.tile,
        )


def whole_bounds(
    position_S: NDArray[np.int64], window: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return begin and end of the keys that each query sees at its position, both int64 [1, S].

    A position of -1 stands for a sequence that this list leaves out.
    """
    end_1S = position_S[None] + 1
    begin_1S = np.zeros_like(end_1S) if not window else np.maximum(end_1S - window, 0)
    return begin_1S, end_1S


def refill(lists: Mapping[Cut, WorkList], position_S: NDArray[np.int64]) -> None:
    """Bring lists of whole contexts to other positions, at the same addresses."""
    for cut, work in lists.items():
        fill(work.numbers, _numbers(*whole_bounds(position_S, cut.window), cut))


def _numbers(begin_RS: NDArray[np.int64], end_RS: NDArray[np.int64], cut: Cut) -> NDArray[np.int32]:
    """Return the numbers of a list: entries [R, E, 4], then first slot and pieces [S, 2]."""
    num_ranges, num_sequences = begin_RS.shape
    num_entries = _most_turns(begin_RS.size) * cut.num_places + num_sequences
    numbers = np.zeros(num_ranges * num_entries * _FIELDS + 2 * num_sequences, dtype=np.int32)
    # A sequence's ranges are neighbours, so that its slots are.
    begin_N, end_N = begin_RS.T.ravel(), end_RS.T.ravel()
    first_N = begin_N // cut.tile
    tiles_N = np.where(begin_N < end_N, -(-end_N // cut.tile) - first_N, 0)
    length = piece_tiles(tiles_N, cut.num_places)
    count_N = -(-tiles_N // length)
    after_N = np.cumsum(count_N)
    context_P = np.repeat(np.arange(len(count_N)), count_N)
    slot_P = np.arange(len(context_P))
    nth_P = slot_P - (after_N - count_N)[context_P]
    tile_P = first_N[context_P] + nth_P * length
    entries_P4 = np.stack(
        (
            context_P // num_ranges,
            np.maximum(tile_P * cut.tile, begin_N[context_P]),
            np.minimum((tile_P + length) * cut.tile, end_N[context_P]),
            slot_P,
        ),
        axis=1,
    )
    order_P = np.argsort(entries_P4[:, 1] - entries_P4[:, 2], kind="stable")
    room_RE4 = numbers[: -2 * num_sequences].reshape(num_ranges, num_entries, _FIELDS)
    for index, room_E4 in enumerate(room_RE4):
        own_P = order_P[context_P[order_P] % num_ranges == index] if num_ranges > 1 else order_P
        room_E4[: len(own_P)] = entries_P4[own_P]
    after_S = after_N[num_ranges - 1 :: num_ranges]
    pieces_S2 = numbers[-2 * num_sequences :].reshape(num_sequences, 2)
    pieces_S2[1:, 0] = after_S[:-1]
    pieces_S2[:, 1] = after_S - pieces_S2[:, 0]
    return numbers


def _most_turns(num_contexts: int) -> int:
    """Return the maximum number of turns. The rests of one or two contexts always fit one place."""
    return 1 if num_contexts <= 2 else _MOST_TURNS


def piece_tiles(tiles_N: NDArray[np.int64], num_places: int) -> int:
    """Return the number of tiles of a whole piece, at least 8.

    It is the mean work of a place. If the pieces then leave places idle at the end, because they
    are few and long, it is a half or a third of that.
    """
    total = int(tiles_N.sum())
    best, least = 0, float("inf")
    for turns in range(1, _most_turns(len(tiles_N)) + 1):
        length = max(_LEAST_TILES, -(-total // (turns * num_places)))
        if length == best:
            break
        load, mean = _loads(tiles_N, length, num_places)
        if load < least:
            best, least = length, load
        if load <= _BALANCED * mean:
            break
    return best


def _loads(tiles_N: NDArray[np.int64], length: int, num_places: int) -> tuple[float, float]:
    """Return the largest and the mean load of a place, in tiles; a piece costs one tile more.

    The largest load is estimated by a bound from below. With the pieces in falling order, some
    place has n + 1 of the first n x places + 1, and none of these is shorter than the last.
    """
    whole_N, rest_N = np.divmod(tiles_N, length)
    num_whole = int(whole_N.sum())
    falling_N = np.sort(rest_N)[::-1]
    num_pieces = num_whole + int(np.count_nonzero(rest_N))
    mean = (int(tiles_N.sum()) + num_pieces) / num_places
    at = np.arange(0, num_pieces, num_places)
    tiles = np.where(at < num_whole, length, falling_N[np.maximum(at - num_whole, 0)])
    loads = (np.arange(len(at)) + 1) * (tiles + 1)
    return max(mean, float(loads.max(initial=0))), mean
