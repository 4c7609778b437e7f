"""The work of the GPU's decode attention in one step, as a list of pieces of the contexts.

A step's contexts may differ a hundredfold in length. If a program read a context, or a fixed share
of it, then all others would wait for the longest one. So every context is cut into pieces of one
length, which follows from the total length and from how many programs run at once. The pieces are
taken from the list in order, the longest first, by whichever processor is free.

Successive tokens of one sequence are sequences of a step, too: those of a draft, and of a short
prompt. As many as fit the rows of a product read the pieces of their common context together.

The host makes the list from lengths that it knows. Its size depends only on the number of
sequences, so a captured step reads it at a fixed address (cuda_graphs.py).

Under a position method a context has several ranges of keys, and each has its own position of the
query and its own key map. Its pieces carry them.

Shapes: S = sequences, R = key ranges of a sequence, E = entries of a list, F = fields of an entry,
N = ranges to cut, P = pieces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.transfer import fill, on_device
from ropewalk.rope import MOST_RANGES, KeyMap, PositionMethod

Ints = NDArray[np.int64]

_LEAST_TILES = 8  # of a piece; with fewer, the partial outputs are not small beside the keys
# Pieces of full length that a place may take one after the other. More balance better, but every
# captured step has an entry for each.
_MOST_TURNS = 3
_BALANCED = 1.05  # a longest load of this times the mean is not worth shorter pieces
_FIELDS = 5  # sequence, begin, end, slot, tokens
_PLACED_FIELDS = 4  # position of the query, period of the tiles, modulus, divisor
# More than any index. As a modulus it changes no index, as a divisor it gives every key position 0.
BEYOND = 2**30


class Rows(NamedTuple):
    """The query tokens of a step, each of a sequence of its own."""

    position_S: NDArray[np.int64]  # -1: a sequence that the list leaves out
    table_id_S: NDArray[np.int64]
    same_pages_S: NDArray[np.bool_]  # whether the pages are those of the sequence before


class Cut(NamedTuple):
    """The parameters by which a layer cuts the contexts. Layers with equal ones share a list."""

    window: int | None  # keys that a query sees, itself included; None: all
    tile: int  # keys that a program reads at once; a piece begins at a multiple of it
    num_places: int  # pieces of one key head that run at the same time
    most_tokens: int = 1  # of a sequence that read a piece together
    has_methods: bool = False  # whether a table of the layer has a position method

    def refilled(self, rows: Rows, methods: Mapping[int, PositionMethod]) -> NDArray[np.int32]:
        """Return the numbers of a list that was cut like this, for other rows."""
        return _numbers(contexts_of(rows, self, methods), self)


class Contexts(NamedTuple):
    """The ranges of keys that the queries of a step read. A range without keys has no piece."""

    begin_RS: NDArray[np.int64]
    end_RS: NDArray[np.int64]
    # That read the ranges, this sequence's and those behind it; 0: a sequence before it has them.
    num_tokens_S: NDArray[np.int64]
    # Query's position, period, modulus and divisor (`_placed`); None: every range is native.
    placed_RS4: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class WorkList:
    """The pieces of a step's contexts on the device. Keys are counted by their place in the pages.

    An entry is a piece: sequence, first key, the key after the last one, the slot of its partial
    result, and the tokens that read it. The slots of a next token follow those of all pieces of the
    token before. Under position methods the query's position and three numbers of the key map
    follow (`_placed`). Entries without a key follow those with keys.
    """

    numbers: Tensor  # int32, all numbers, in one transfer
    entries_EF: Tensor  # a view of them
    pieces_S2: Tensor  # a view of them: first slot and number of pieces of each sequence
    most_pieces: int  # of a sequence, for any lengths
    num_slots: int  # for the partial results of any lengths
    tile: int  # of the cut
    methods: Mapping[int, PositionMethod]  # by table id; empty: native contexts

    @classmethod
    def of(
        cls,
        contexts: Contexts,
        cut: Cut,
        device: torch.device,
        methods: Mapping[int, PositionMethod] | None = None,
    ) -> Self:
        """Cut the contexts, and send the list to the device; `methods`: of the layer's tables."""
        num_ranges, num_sequences = contexts.begin_RS.shape
        numbers = on_device(_numbers(contexts, cut), device)
        at = numbers.numel() - 2 * num_sequences
        num_whole = most_turns(num_ranges * num_sequences) * cut.num_places
        return cls(
            numbers,
            numbers[:at].view(-1, _num_fields(contexts)),
            numbers[at:].view(num_sequences, 2),
            num_whole + num_ranges,
            num_whole * cut.most_tokens + num_ranges * num_sequences,
            cut.tile,
            methods or {},
        )


def tokens_together(rows: Rows, most: int, methods: Mapping[int, PositionMethod]) -> Ints:
    """Return how many tokens each sequence stands for, its own and those behind it; 0: it has one.

    They are successive tokens over the same pages and under the same table, at most `most`. Under
    a method each has its own ranges.
    """
    position_S, table_id_S, same_pages_S = rows
    number_S = np.arange(len(position_S))
    is_next_S = same_pages_S.copy()
    if most == 1 or not is_next_S.any():
        return np.ones_like(number_S)
    is_next_S[1:] &= (np.diff(position_S) == 1) & (position_S[:-1] >= 0)
    is_next_S[1:] &= np.diff(table_id_S) == 0
    is_next_S &= ~np.isin(table_id_S, list(methods))
    first_S = np.maximum.accumulate(np.where(is_next_S, 0, number_S))
    leading = np.flatnonzero((number_S - first_S) % most == 0)
    num_tokens_S = np.zeros_like(number_S)
    num_tokens_S[leading] = np.diff(leading, append=len(number_S))
    return num_tokens_S


def whole_contexts(
    position_S: NDArray[np.int64], window: int | None, num_tokens_S: Ints | None = None
) -> Contexts:
    """Return the keys that each query sees at its position, as one range.

    A position of -1 stands for a sequence that this list leaves out. `num_tokens_S`: as
    `tokens_together` says; None: each stands for its own.
    """
    if num_tokens_S is None:
        num_tokens_S = np.ones_like(position_S)
    begin_S = np.zeros_like(position_S) if not window else np.maximum(position_S + 1 - window, 0)
    end_S = np.where(num_tokens_S > 0, position_S + num_tokens_S, begin_S)
    return Contexts(begin_S[None], end_S[None], num_tokens_S)


def contexts_of(rows: Rows, cut: Cut, methods: Mapping[int, PositionMethod]) -> Contexts:
    """Return the ranges of each query under its table's method; without one it is read natively.

    `methods`: by table id; empty: as `whole_contexts`.
    """
    position_S, table_id_S, _ = rows
    num_tokens_S = tokens_together(rows, cut.most_tokens, methods)
    whole = whole_contexts(position_S, cut.window, num_tokens_S)
    if not methods:
        return whole
    begin_RS, end_RS = np.zeros((2, MOST_RANGES, len(position_S)), dtype=np.int64)
    begin_RS[0], end_RS[0] = whole.begin_RS[0], whole.end_RS[0]
    placed_RS4 = np.empty((*begin_RS.shape, _PLACED_FIELDS), dtype=np.int64)
    placed_RS4[..., 0], placed_RS4[..., 1:] = position_S, _placed(KeyMap(), cut.tile)
    for table_id, method in methods.items():
        own_Q = np.flatnonzero((table_id_S == table_id) & (position_S >= 0))
        if not len(own_Q):
            continue
        ranges = method.ranges(torch.from_numpy(position_S[own_Q]))
        for index, (found, key_map) in enumerate(zip(ranges, method.key_maps, strict=True)):
            begin_Q, end_Q, query_Q = (each.numpy() for each in found)
            # The window is part of every range.
            begin_RS[index, own_Q] = np.maximum(begin_Q, whole.begin_RS[0, own_Q])
            end_RS[index, own_Q] = end_Q
            placed_RS4[index, own_Q, 0] = query_Q
            placed_RS4[index, own_Q, 1:] = _placed(key_map, cut.tile)
    return Contexts(begin_RS, end_RS, num_tokens_S, placed_RS4)


def _placed(key_map: KeyMap, tile: int) -> tuple[int, int, int]:
    """Return the period at whose multiples tiles begin anew, the modulus, and the divisor.

    All tiles then have the same angles inside. Keys modulo M begin again at 0 with every period.
    Under a divisor G, the keys of a tile share a position if G has at least a tile. With less, a
    tile begins at a multiple of G. If pages are multiples of a tile, then the page is a multiple of
    the period or the period one of the page, so no tile crosses the end of a page.
    """
    modulus, divisor = key_map
    if divisor == 1:
        return modulus or BEYOND, modulus, 1
    assert not modulus, "tiles have one period"
    if divisor == 0 or divisor >= tile:
        return divisor or BEYOND, 0, divisor or BEYOND
    return divisor << ((tile // divisor).bit_length() - 1), 0, divisor


def refill(lists: Mapping[Any, Any], rows: Rows) -> None:
    """Bring lists to other rows, at the same addresses; also those of ExactCut."""
    for cut, work in lists.items():
        fill(work.numbers, cut.refilled(rows, work.methods))


def _num_fields(contexts: Contexts) -> int:
    return _FIELDS if contexts.placed_RS4 is None else _FIELDS + _PLACED_FIELDS


def _numbers(contexts: Contexts, cut: Cut) -> NDArray[np.int32]:
    """Return the numbers of a list: entries [E, F], then first slot and pieces [S, 2]."""
    begin_RS, end_RS, num_tokens_S, placed_RS4 = contexts
    num_ranges, num_sequences = begin_RS.shape
    num_fields = _num_fields(contexts)
    num_entries = most_turns(begin_RS.size) * cut.num_places + begin_RS.size
    numbers = np.zeros(num_entries * num_fields + 2 * num_sequences, dtype=np.int32)
    # A sequence's ranges are neighbours, so that its slots are.
    begin_N, end_N = begin_RS.T.ravel(), end_RS.T.ravel()
    placed_N4 = (
        None if placed_RS4 is None else placed_RS4.transpose(1, 0, 2).reshape(begin_RS.size, -1)
    )
    period_N = None if placed_N4 is None else placed_N4[:, 1]
    first_N = _tile_of(begin_N, period_N, cut.tile)
    last_N = _tile_of(end_N - 1, period_N, cut.tile)
    tiles_N = np.where(begin_N < end_N, last_N + 1 - first_N, 0)
    length = piece_tiles(tiles_N, cut.num_places)
    count_N = -(-tiles_N // length)
    context_P = np.repeat(np.arange(len(count_N)), count_N)
    sequence_P, number_P = context_P // num_ranges, np.arange(len(context_P))
    nth_P = number_P - (np.cumsum(count_N) - count_N)[context_P]
    pieces_S = count_N.reshape(num_sequences, num_ranges).sum(1)
    before_S = np.cumsum(pieces_S) - pieces_S
    # A token has as many slots as the one before whose pieces it reads.
    pieces_S = pieces_S[np.maximum.accumulate(np.arange(num_sequences) * (num_tokens_S > 0))]
    first_S = np.cumsum(pieces_S) - pieces_S
    tile_P = first_N[context_P] + nth_P * length
    period_P = None if period_N is None else period_N[context_P]
    fields = [
        sequence_P,
        np.maximum(_first_key(tile_P, period_P, cut.tile), begin_N[context_P]),
        np.minimum(_first_key(tile_P + length, period_P, cut.tile), end_N[context_P]),
        number_P + (first_S - before_S)[sequence_P],
        num_tokens_S[sequence_P],
    ]
    if placed_N4 is not None:
        fields += [*placed_N4[context_P].T]
    entries_PF = np.stack(fields, axis=1)
    order_P = np.argsort(entries_PF[:, 1] - entries_PF[:, 2], kind="stable")
    numbers[: entries_PF.size] = entries_PF[order_P].ravel()
    numbers[-2 * num_sequences :] = np.stack((first_S, pieces_S), axis=1).ravel()
    return numbers


def _tile_of(
    index_N: NDArray[np.int64], period_N: NDArray[np.int64] | None, tile: int
) -> NDArray[np.int64]:
    if period_N is None:
        return index_N // tile
    return index_N // period_N * -(-period_N // tile) + index_N % period_N // tile


def _first_key(
    tile_P: NDArray[np.int64], period_P: NDArray[np.int64] | None, tile: int
) -> NDArray[np.int64]:
    """Return the index of a tile's first key."""
    if period_P is None:
        return tile_P * tile
    per_period_P = -(-period_P // tile)
    return tile_P // per_period_P * period_P + tile_P % per_period_P * tile


def most_turns(num_contexts: int) -> int:
    """Return the maximum number of turns. The rests of one or two contexts always fit one place."""
    return 1 if num_contexts <= 2 else _MOST_TURNS


def piece_tiles(tiles_N: NDArray[np.int64], num_places: int) -> int:
    """Return the number of tiles of a whole piece, at least 8.

    It is the mean work of a place. If the pieces then leave places idle at the end, because they
    are few and long, it is a half or a third of that.
    """
    total = int(tiles_N.sum())
    best, least = 0, float("inf")
    for turns in range(1, most_turns(len(tiles_N)) + 1):
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
