"""The compile options of the decode kernel, and how many of its programs a processor runs.

They follow the shared memory of the card that is there. The work list is cut for the programs that
run at the same time. If fewer of them fitted, the list would be read in two waves.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.attention.rope_tables import TILE
from ropewalk.model_runtime.gpu.cards.card import Card, card_of
from ropewalk.model_runtime.gpu.primitives import padded, tile_len


@dataclass(frozen=True, slots=True)
class Tuning:
    """The compile options of the kernel, and the number of programs per processor."""

    num_warps: int = 4
    num_stages: int = 5  # 5: a page's number and two tiles are in flight; 3: one tile
    # Run at the same time, and the cut of the keys fills them. There are registers for two.
    programs_per_processor: int = 2


# The best first. A card with less shared memory has slower memory, too: a tile in flight in each of
# two programs is more than arrives in a microsecond.
_TUNINGS = (
    Tuning(),
    Tuning(num_stages=3),
    Tuning(programs_per_processor=1),
    Tuning(num_stages=3, programs_per_processor=1),
)


class Sizes(NamedTuple):
    """The sizes that decide a program's shared memory."""

    group: int  # query heads of a key head
    num_pairs: int  # that are rotated
    dim: int
    value_dim: int
    dtype: torch.dtype  # of the cache

    @property
    def tile(self) -> int:
        """Return the number of keys that a program holds at once."""
        return tile_len(TILE, max(self.dim, self.value_dim), self.multiplied)

    @property
    def most_tokens(self) -> int:
        """Return the number of tokens of a sequence that fill the rows of a product."""
        return padded(self.group) // self.group

    @property
    def multiplied(self) -> torch.dtype:
        """Return the type in which keys and values are multiplied."""
        return torch.float16 if self.dtype == torch.int8 else self.dtype


def sizes_of(read: LayerRead) -> Sizes:
    """Return the sizes of a layer."""
    num_key_heads, dim = read.keys_NKDO.shape[1:3]
    group, value_dim = read.query_THD.shape[1] // num_key_heads, read.values_NKOV.shape[-1]
    return Sizes(group, read.tables.num_pairs, dim, value_dim, read.keys_NKDO.dtype)


def tuning_of(read: LayerRead) -> Tuning:
    """Return the tuning of a layer on its device."""
    return _tuning_on(read.query_THD.device, sizes_of(read))


@cache
def _tuning_on(device: torch.device, sizes: Sizes) -> Tuning:
    return best_tuning(card_of(device), sizes)


def best_tuning(card: Card, sizes: Sizes) -> Tuning:
    """Return the first tuning whose programs fit a processor of the card; else the last one."""
    for tuning in _TUNINGS:
        if card.has_room(tuning.programs_per_processor, shared_bytes(sizes, tuning.num_stages)):
            return tuning
    return _TUNINGS[-1]


def shared_bytes(sizes: Sizes, num_stages: int) -> int:
    """Return the shared memory of a program: as much as the compiler takes, or a little more.

    These are the tiles in flight with their pages' numbers, and what products take from there: half
    of a rotated tile, queries, probabilities, and the angles of both.
    """
    pairs = padded(sizes.num_pairs) if sizes.num_pairs else 0
    plain = sizes.dim - 2 * sizes.num_pairs
    rest = padded(plain) if plain else 0
    rows, tile, size = padded(sizes.group), sizes.tile, sizes.dtype.itemsize
    loaded = tile * ((2 * pairs + rest + padded(sizes.value_dim)) * size + 8)
    operands = pairs * (tile + 2 * rows) + (rest + tile) * rows
    in_flight = max(1, (num_stages - 1) // 2)
    return in_flight * (loaded + 16 * pairs) + operands * sizes.multiplied.itemsize
