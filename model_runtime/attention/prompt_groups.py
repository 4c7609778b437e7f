"""The prompts of a step in packed rows: the host's lists for the GPU's prefill, made once a step.

A prompt here is a sequence with several query tokens in the step. The query tokens of all prompts
lie one after the other in packed rows, and so do the keys that they see. Cumulative offsets say
which rows belong to which prompt. A list of tiles gives each program of a kernel its rows, so a
single launch serves prompts of all lengths.

Shapes: T = packed query tokens, G = prompts of a group, W = tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runtime.batch import Batch, Place
from model_runtime.transfer import on_device

Ints = NDArray[np.integer[Any]]

# The prompts of a group have at most this number of keys together. Then a group's kernels take
# much longer than their launches, and larger groups would gain nothing.
MOST_KEYS = 32_768
_ALIGNED = 4  # int32 numbers in 16 bytes


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The packed query tokens of a step, in the order of the flat row."""

    row_T: Tensor  # int32, each token's place in the flat row
    position_T: Tensor  # int32, absolute
    table_id_T: Tensor  # int32


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Successive prompts whose keys are gathered together.

    The tiles are pairs of a prompt in the group and a first row, counted from the prompt's start.
    """

    rows: slice  # of the packed query tokens
    num_keys: int  # of all prompts
    most_tokens: int  # of a prompt
    most_keys: int
    row_T: Tensor  # int32, the flat rows of the group's query tokens
    cu_tokens_G1: Tensor  # int32 [G + 1], cumulative numbers of query tokens
    cu_keys_G1: Tensor  # int32 [G + 1], cumulative numbers of keys
    first_key_G: Tensor  # int32, position of each prompt's first key
    page_at_G: Tensor  # int32, place of each prompt's first page in the flattened page table
    table_id_G: Tensor  # int32
    token_tiles_W2: Tensor  # int32, tiles of query tokens
    key_tiles_W2: Tensor  # int32, tiles of keys


class Prompts:
    """The prompts of one step. Layers with the same window and tile length share the groups."""

    def __init__(self, batch: Batch) -> None:
        self._device = batch.page_T.device
        self._table_width = batch.page_table_SN.shape[1]
        places = enumerate(batch.places_S)
        self._places = [(index, place) for index, place in places if place.num_tokens > 1]
        self._groups: dict[tuple[int, int], list[PromptGroup]] = {}

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._places)

    @cached_property
    def queries(self) -> QueryRows:
        """Return the places of all query tokens."""
        places = [place for _, place in self._places]
        positions_T = [np.arange(p.num_tokens) + p.first_position for p in places]
        num_tokens = [place.num_tokens for place in places]
        table_id_T = np.repeat([place.table_id for place in places], num_tokens)
        parts = (_rows(places), np.concatenate(positions_T), table_id_T)
        return QueryRows(*_on_device(parts, self._device))

    def groups(self, window: int | None, tile: int) -> list[PromptGroup]:
        """Return the groups of a layer with this window; `tile`: rows that a program takes.

        The keys of a group are in memory at the same time. They are at most MOST_KEYS, or the keys
        of one longer prompt. With a window, the keys before the first one that is seen are left
        out.
        """
        chosen = (window or 0, tile)
        if chosen not in self._groups:
            self._groups[chosen] = list(self._divided(window, tile))
        return self._groups[chosen]

    def _divided(self, window: int | None, tile: int) -> Iterator[PromptGroup]:
        first_row, num_rows, num_keys = 0, 0, 0
        waiting: list[tuple[int, Place, int]] = []
        for index, place in self._places:
            first_key = max(0, place.first_position + 1 - window) if window else 0
            more = place.first_position + place.num_tokens - first_key
            if waiting and num_keys + more > MOST_KEYS:
                yield self._group(waiting, first_row, tile)
                first_row, num_rows, num_keys, waiting = first_row + num_rows, 0, 0, []
            waiting.append((index, place, first_key))
            num_rows, num_keys = num_rows + place.num_tokens, num_keys + more
        yield self._group(waiting, first_row, tile)

    def _group(
        self, prompts: list[tuple[int, Place, int]], first_row: int, tile: int
    ) -> PromptGroup:
        places = [place for _, place, _ in prompts]
        first_key_G = np.array([first_key for _, _, first_key in prompts])
        num_tokens_G = np.array([place.num_tokens for place in places])
        end_G = np.array([place.first_position for place in places]) + num_tokens_G
        num_keys_G = end_G - first_key_G
        num_rows, num_keys = int(num_tokens_G.sum()), int(num_keys_G.sum())
        parts = (
            _rows(places),
            _cumulative(num_tokens_G),
            _cumulative(num_keys_G),
            first_key_G,
            np.array([index for index, _, _ in prompts]) * self._table_width,
            np.array([place.table_id for place in places]),
            _tiles(num_tokens_G, tile)[::-1],  # a prompt's last tokens see the most keys
            _tiles(num_keys_G, tile),
        )
        return PromptGroup(
            slice(first_row, first_row + num_rows),
            num_keys,
            int(num_tokens_G.max()),
            int(num_keys_G.max()),
            *_on_device(parts, self._device),
        )


def _rows(places: list[Place]) -> Ints:
    """Return the flat rows of the places' tokens."""
    return np.concatenate([np.arange(p.num_tokens) + p.begin for p in places])


def _cumulative(lens_G: Ints) -> Ints:
    return np.concatenate((np.zeros(1, lens_G.dtype), np.cumsum(lens_G)))


def _tiles(lens_G: Ints, tile: int) -> Ints:
    """Return the tiles of all prompts, [W, 2]."""
    counts_G = -(-lens_G // tile)
    prompt_W = np.repeat(np.arange(len(lens_G)), counts_G)
    number_W = np.arange(len(prompt_W)) - (np.cumsum(counts_G) - counts_G)[prompt_W]
    return np.stack((prompt_W, number_W * tile), axis=1)


def _on_device(parts: tuple[Ints, ...], device: torch.device) -> list[Tensor]:
    """Return the parts as int32 tensors, by one transfer.

    Each begins at a multiple of 16 bytes. Triton compiles a kernel again if the alignment of an
    argument changes.
    """
    sizes = [-(-part.size // _ALIGNED) * _ALIGNED for part in parts]
    joined = np.zeros(sum(sizes), dtype=np.int32)
    begin = 0
    for part, size in zip(parts, sizes, strict=True):
        joined[begin : begin + part.size] = part.ravel()
        begin += size
    pieces = on_device(joined, device).split_with_sizes(sizes)
    return [piece[: part.size].view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
