"""The form that all position methods have: ranges of keys, a query position and a key map for each.

A query reads at most three ranges of its keys. In each range the query stands at a position of the
method's choice, and a key at the key map's. Ranges are disjoint, so one softmax over all of them is
the attention. The true position of a query stays what it is: log-n takes that one.

Shapes: T = queries, C = keys.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ropewalk.rope.errors import RopeConfigError

if TYPE_CHECKING:
    from torch import Tensor

MOST_RANGES = 3


class KeyMap(NamedTuple):
    """The position at which a range reads the key with index n: (n mod modulus) // divisor."""

    modulus: int = 0  # 0: none
    divisor: int = 1  # 0: every key is at position 0, so keys are not rotated

    def positions(self, index_C: "Tensor") -> "Tensor":
        """Return the positions of keys by their index, int64 [C]."""
        if self.divisor == 0:
            return index_C * 0
        return (index_C % self.modulus if self.modulus else index_C) // self.divisor


NATIVE_KEYS = KeyMap()
UNROTATED_KEYS = KeyMap(divisor=0)


class Range(NamedTuple):
    """One range of some queries. No number falls from one query position to the next."""

    begin_T: "Tensor"  # int64, index of the first key
    end_T: "Tensor"  # int64, index after the last key; not above begin: no key
    query_T: "Tensor"  # int64, position at which the query stands; never above its true position


class PositionMethod(ABC):
    """One way to place queries and keys; a frozen dataclass, so that profiles can be hashed."""

    __slots__ = ()
    method: ClassVar[str]

    @property
    @abstractmethod
    def key_maps(self) -> tuple[KeyMap, ...]:
        """Return the key map of each range."""

    @property
    @abstractmethod
    def num_native(self) -> int:
        """Return the number of first positions whose queries read as without a method."""

    @property
    def attention_factor(self) -> float:
        """Return the factor of cos and sin, beside the table's own."""
        return 1.0

    @property
    def kept(self) -> tuple[int, int] | None:
        """Return the numbers of first and of last tokens that a query reads; None: it reads all."""
        return None

    @abstractmethod
    def ranges(self, positions_T: "Tensor") -> tuple[Range, ...]:
        """Return the ranges of queries at true positions, int64 [T], from the first keys on."""

    @abstractmethod
    def reach(self, native_len: int) -> int | None:
        """Return the longest context within L different distances, in tokens; None: no limit."""

    def seen_distances(self, position: int, distances: Sequence[int]) -> list[int | None]:
        """Return the distances at which the query at a position sees its keys; None: not read.

        `distances` are the true ones, at most the position.
        """
        import torch  # noqa: PLC0415  # planning needs no tables

        seen: list[int | None] = []
        ranges = [tuple(map(int, each)) for each in self.ranges(torch.tensor([position]))]
        for distance in distances:
            index = position - distance
            found = None
            for (begin, end, query), key_map in zip(ranges, self.key_maps, strict=True):
                if begin <= index < end:
                    found = query - int(key_map.positions(torch.tensor(index)))
            seen.append(found)
        return seen

    def described(self) -> dict[str, Any]:
        """Return the method and its parameters, as answers report them and requests name them."""
        return {"method": self.method, **asdict(self)}  # type: ignore[call-overload]

    def __str__(self) -> str:
        """Return the method and its parameters in words."""
        name, *values = self.described().items()
        return ", ".join((name[1], *(f"{field} {value:g}" for field, value in values)))

    def check_pages(self, page_size: int) -> None:
        """Raise RopeConfigError if a page of the cache does not fit the key maps."""
        for modulus, divisor in self.key_maps:
            if modulus % page_size:
                raise RopeConfigError(
                    "positions.chunk_size",
                    f"minus local_size is {modulus}, which must be a multiple of the page size "
                    f"({page_size})",
                )
            if divisor and page_size % divisor and divisor % page_size:
                raise RopeConfigError(
                    "positions.group",
                    f"is {divisor}, which must divide the page size ({page_size}) or be a multiple "
                    "of it",
                )
