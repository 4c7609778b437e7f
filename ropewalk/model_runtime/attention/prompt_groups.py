"""The prompts of a step in packed rows: the host's lists for the GPU's prefill, made once a step.

A prompt here is a sequence with several query tokens in the step. The query tokens of all prompts
lie one after the other in packed rows, and so do the keys that they see. Cumulative offsets say
which rows belong to which prompt. A list of tiles gives each program of a kernel its rows, so a
single launch serves prompts of all lengths.

Shapes: T = packed query tokens, G = prompts of a group, W = tiles.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Batch, Place
from ropewalk.model_runtime.transfer import fill, on_device
from ropewalk.rope import KeyMap

Ints = NDArray[np.integer[Any]]

# The prompts of a group have at most this number of keys together. Then a group's kernels take
# much longer than their launches, and larger groups would gain nothing.
MOST_KEYS = 32_768
_ALIGNED = 4  # int32 numbers in 16 bytes


class Mask(NamedTuple):
    """The keys that a row sees, counted from its own; the last row's own key is the last one.

    Both are in the sense of torch's flash attention.
    """

    left: int  # keys before its own; -1: all
    right: int  # keys after its own: 0 (causal) or -1 (all)


class Part(NamedTuple):
    """Successive query tokens of a sequence, and the successive keys that they see."""

    sequence: int  # in the batch
    begin: int  # the first token's place in the flat row
    num_tokens: int
    first_position: int  # absolute
    first_key: int
    num_keys: int
    table_id: int
    placed_T: Ints | None = None  # the positions at which the tokens stand; None: their own
    key_map: KeyMap = KeyMap()

    @classmethod
    def whole(cls, sequence: int, place: Place, window: int | None) -> Self:
        """Return all tokens of a prompt, with the keys up to its last token.

        With a window, the keys before the first one that is seen are left out.
        """
        begin, num_tokens, first, table_id = place
        first_key = max(0, first + 1 - window) if window else 0
        num_keys = first + num_tokens - first_key
        return cls(sequence, begin, num_tokens, first, first_key, num_keys, table_id)


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The packed query tokens of a step, in the order of the flat row."""

    row_T: Tensor  # int32, each token's place in the flat row
    position_T: Tensor  # int32, absolute
    table_id_T: Tensor  # int32
    placed_T: Tensor | None = None  # int32, positions at which they stand; None: their own


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Parts of prompts whose keys are gathered together, and which have one mask.

    The tiles are pairs of a part in the group and a first row, counted from the part's start.
    """

    mask: Mask
    num_keys: int  # of all parts
    most_tokens: int  # of a part
    most_keys: int
    row_T: Tensor  # int32, the flat rows of the group's query tokens
    cu_tokens_G1: Tensor  # int32 [G + 1], cumulative numbers of query tokens
    cu_keys_G1: Tensor  # int32 [G + 1], cumulative numbers of keys
    first_key_G: Tensor  # int32, index of each part's first key
    page_at_G: Tensor  # int32, place of each part's first page in the flattened page table
    table_id_G: Tensor  # int32
    token_tiles_W2: Tensor  # int32, tiles of query tokens
    key_tiles_W2: Tensor  # int32, tiles of keys
    # Whether the numbers of tokens, prompts and keys are the room of a captured step.
    is_padded: bool = field(default=False, kw_only=True)


class Prompts:
    """The prompts of one step. Layers with the same window and tile length share the groups.

    `placed`: tables whose sequences are left out, because a position method reads them.
    """

    def __init__(self, batch: Batch, placed: Collection[int] = ()) -> None:
        self._device = batch.page_T.device
        self._table_width = batch.page_table_SN.shape[1]
        self._places = [
            (index, place)
            for index, place in enumerate(batch.places_S)
            if place.num_tokens > 1 and place.table_id not in placed
        ]
        self._groups: dict[tuple[int, int], list[PromptGroup]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @cached_property
    def queries(self) -> QueryRows:
        """Return the places of all query tokens."""
        parts = [Part.whole(index, place, None) for index, place in self._places]
        return QueryRows(*together_on_device(_query_numbers(parts), self._device))

    def groups(self, window: int | None, tile: int) -> list[PromptGroup]:
        """Return the groups of a layer with this window; `tile`: rows that a program takes.

        They have the prompts in order.
        """
        chosen = (window or 0, tile)
        if chosen not in self._groups:
            parts = [Part.whole(index, place, window) for index, place in self._places]
            mask = Mask(window - 1 if window else -1, 0)
            self._groups[chosen] = [
                group_of(each, mask, tile, self._table_width, self._device)
                for each in divided(parts)
            ]
        return self._groups[chosen]


def divided(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield successive parts whose keys may be in memory at the same time.

    The keys are at most MOST_KEYS, or those of one part with more.
    """
    num_keys = 0
    together: list[Part] = []
    for part in parts:
        if together and num_keys + part.num_keys > MOST_KEYS:
            yield together
            num_keys, together = 0, []
        together.append(part)
        num_keys += part.num_keys
    yield together


def group_of(
    parts: Sequence[Part], mask: Mask, tile: int, table_width: int, device: torch.device
) -> PromptGroup:
    """Return the group of these parts, with its numbers on the device by one transfer."""
    num_keys_G = [part.num_keys for part in parts]
    return PromptGroup(
        mask,
        sum(num_keys_G),
        max(part.num_tokens for part in parts),
        max(num_keys_G),
        *together_on_device(_group_numbers(parts, tile, table_width), device),
    )


def _group_numbers(parts: Sequence[Part], tile: int, table_width: int) -> tuple[Ints, ...]:
    """Return the numbers of a group's tensors, in the order of its fields."""

    def each(name: str) -> Ints:
        return np.array([getattr(part, name) for part in parts], dtype=np.int64)

    num_tokens_G, num_keys_G = each("num_tokens"), each("num_keys")
    return (
        rows_of(parts),
        _cumulative(num_tokens_G),
        _cumulative(num_keys_G),
        each("first_key"),
        each("sequence") * table_width,
        each("table_id"),
        _tiles(num_tokens_G, tile)[::-1],  # a part's last tokens see the most keys
        _tiles(num_keys_G, tile),
    )


class PaddedPrompts:
    """The prompts of captured steps: lists at fixed addresses, which are filled again.

    They have room for some prompts with so many tokens and gathered keys together. Padding is a row
    or a tile of -1, or a prompt without tokens. Smaller steps have the first part of the lists.
    """

    def __init__(
        self, num_tokens: int, num_prompts: int, num_keys: int, width: int, device: torch.device
    ) -> None:
        """Take the room. `width`: of the page table."""
        self._room = num_tokens, num_prompts, num_keys
        self._num_tokens, self._num_prompts = num_tokens, num_prompts
        self._width, self._device = width, device
        self._parts: list[tuple[int, Place]] = []
        # By window and tile, None: of the queries. The numbers in one tensor, and views of it.
        self._made: dict[tuple[int, int] | None, tuple[Tensor, list[Tensor]]] = {}

    def __len__(self) -> int:
        return self._num_prompts

    def of_size(self, num_tokens: int, num_prompts: int) -> Self:
        """Return the lists of a smaller step, in the same memory."""
        other = copy(self)
        other._num_tokens, other._num_prompts = num_tokens, num_prompts  # noqa: SLF001  # own
        return other

    def refill(self, prompts: Sequence[tuple[int, Place]]) -> None:
        """Bring all lists to other prompts: the sequence of each, and its place."""
        self._parts[:] = prompts
        for key, (joined, _) in self._made.items():
            fill(joined, _joined(self._numbers(key))[0])

    @property
    def queries(self) -> QueryRows:
        """Return the places of all query tokens."""
        row_T, position_T, table_id_T = self._lists(None)
        return QueryRows(*(each[: self._num_tokens] for each in (row_T, position_T, table_id_T)))

    def groups(self, window: int | None, tile: int) -> list[PromptGroup]:
        """Return the one group of a layer, as `Prompts.groups` does."""
        row_T, cu_tokens_G1, cu_keys_G1, *of_prompts, token_tiles_W2, key_tiles_W2 = self._lists(
            (window or 0, tile)
        )
        first_key_G, page_at_G, table_id_G = (each[: self._num_prompts] for each in of_prompts)
        num_tokens, num_prompts, num_keys = self._num_tokens, self._num_prompts, self._room[2]
        mask = Mask(window - 1 if window else -1, 0)
        return [
            PromptGroup(
                mask,
                num_keys,
                num_tokens,
                num_keys,
                row_T[:num_tokens],
                cu_tokens_G1[: num_prompts + 1],
                cu_keys_G1[: num_prompts + 1],
                first_key_G,
                page_at_G,
                table_id_G,
                token_tiles_W2[: num_tokens // tile + num_prompts],
                key_tiles_W2[: num_keys // tile + num_prompts],
                is_padded=True,
            )
        ]

    def _lists(self, key: tuple[int, int] | None) -> list[Tensor]:
        if key not in self._made:
            numbers = self._numbers(key)
            joined, sizes = _joined(numbers)
            on_it = on_device(joined, self._device)
            self._made[key] = on_it, _split(on_it, numbers, sizes)
        return self._made[key][1]

    def _numbers(self, key: tuple[int, int] | None) -> tuple[Ints, ...]:
        """Return the numbers of a window and a tile, or of the queries, with padding."""
        num_tokens, num_prompts, num_keys = self._room
        window, tile = key or (0, 1)
        parts = [Part.whole(index, place, window or None) for index, place in self._parts]
        if key is None:
            return tuple(_padded(each, num_tokens, -1) for each in _query_numbers(parts))
        rows_T, cu_tokens_G1, cu_keys_G1, *of_prompts, token_tiles, key_tiles = _group_numbers(
            parts, tile, self._width
        )
        return (
            _padded(rows_T, num_tokens, -1),
            *(_padded(each, num_prompts + 1, each[-1]) for each in (cu_tokens_G1, cu_keys_G1)),
            *(_padded(each, num_prompts, 0) for each in of_prompts),
            _padded(token_tiles, num_tokens // tile + num_prompts, -1),
            _padded(key_tiles, num_keys // tile + num_prompts, -1),
        )


def _padded(numbers_X: Ints, length: int, padding: int) -> Ints:
    """Return rows of numbers, followed by rows of padding."""
    padded_X = np.full((length, *numbers_X.shape[1:]), padding, dtype=np.int64)
    padded_X[: len(numbers_X)] = numbers_X
    return padded_X


def _query_numbers(parts: Sequence[Part]) -> tuple[Ints, Ints, Ints]:
    """Return the rows, positions and tables of all query tokens."""
    table_id_P, num_tokens_P = (
        np.array([getattr(part, name) for part in parts], dtype=np.int64)
        for name in ("table_id", "num_tokens")
    )
    table_id_T = np.repeat(table_id_P, num_tokens_P)
    return rows_of(parts), positions_of(parts), table_id_T


def rows_of(parts: Iterable[Part]) -> Ints:
    """Return the flat rows of the parts' tokens."""
    return _ranges((part.begin, part.num_tokens) for part in parts)


def positions_of(parts: Iterable[Part]) -> Ints:
    return _ranges((part.first_position, part.num_tokens) for part in parts)


def _ranges(ranges: Iterable[tuple[int, int]]) -> Ints:
    every = [np.arange(first, first + count) for first, count in ranges]
    return np.concatenate(every or [np.empty(0, dtype=np.int64)])


def _cumulative(lens_G: Ints) -> Ints:
    return np.concatenate((np.zeros(1, lens_G.dtype), np.cumsum(lens_G)))


def _tiles(lens_G: Ints, tile: int) -> Ints:
    """Return the tiles of all prompts, [W, 2]."""
    counts_G = -(-lens_G // tile)
    prompt_W = np.repeat(np.arange(len(lens_G)), counts_G)
    number_W = np.arange(len(prompt_W)) - (np.cumsum(counts_G) - counts_G)[prompt_W]
    return np.stack((prompt_W, number_W * tile), axis=1)


def together_on_device(parts: tuple[Ints, ...], device: torch.device) -> list[Tensor]:
    """Return the parts as int32 tensors, by one transfer.

    Each begins at a multiple of 16 bytes. Triton compiles a kernel again if the alignment of an
    argument changes.
    """
    joined, sizes = _joined(parts)
    return _split(on_device(joined, device), parts, sizes)


def _joined(parts: tuple[Ints, ...]) -> tuple[NDArray[np.int32], list[int]]:
    """Return the parts in one array, and the size of each in it."""
    sizes = [-(-part.size // _ALIGNED) * _ALIGNED for part in parts]
    joined = np.zeros(sum(sizes), dtype=np.int32)
    begin = 0
    for part, size in zip(parts, sizes, strict=True):
        joined[begin : begin + part.size] = part.ravel()
        begin += size
    return joined, sizes


def _split(joined: Tensor, parts: tuple[Ints, ...], sizes: list[int]) -> list[Tensor]:
    pieces = joined.split_with_sizes(sizes)
    return [piece[: part.size].view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
