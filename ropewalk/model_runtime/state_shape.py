"""The sizes of states, and the slots that hold them; no torch.

Some layers mix tokens by a state of each sequence, in place of keys and values.
"""

from dataclasses import dataclass
from typing import NamedTuple

_STATE_ITEM_SIZE = 4  # float32, whatever the number type of keys and values


@dataclass(frozen=True, slots=True)
class StateShape:
    """The numbers that a layer keeps of one sequence, in place of keys and values."""

    num_kept: int  # last inputs of its convolution
    num_channels: int  # of each input
    num_heads: int = 0  # of its recurrent state; 0: it has none
    key_dim: int = 0
    value_dim: int = 0

    @property
    def num_bytes(self) -> int:
        """Return the memory of one slot."""
        numbers = self.num_kept * self.num_channels
        return (numbers + self.num_heads * self.key_dim * self.value_dim) * _STATE_ITEM_SIZE


class StatePart(NamedTuple):
    """A part of a span, after which the states of its sequence are in a slot.

    The slot that is written may be the one that is read. If it is not, the read one keeps the
    states before the part.
    """

    num_tokens: int
    read: int | None  # the slot with the states before it; None: zeros
    write: int
    is_draft: bool = False  # of tokens that may turn out wrong; nothing reads what it writes
