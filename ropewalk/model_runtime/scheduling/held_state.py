"""The slots that one running sequence holds."""

from bisect import insort
from dataclasses import dataclass, field

from ropewalk.model_runtime.scheduling.prefix_cache import Key


@dataclass(slots=True)
class HeldState:
    """A sequence's slots, and the snapshots that it will take."""

    own: int  # the slot that only this sequence reads and writes
    read: int | None  # the slot with the state after its first `num_tokens`; None: zeros
    planned: list[int]  # positions of snapshots in its known tokens, ascending
    num_tokens: int  # those computed; fewer after a draft, whose right tokens come later
    pending: list[tuple[int, int]] = field(default_factory=list)  # position, slot; of a step
    next: int | None = None  # the slot with the state after the step that runs
    next_tokens: int = 0  # its tokens
    draft_row: int = 0  # place of the step's flat row where the draft begins
    draft_begin: int = 0  # the position of that token
    newest: tuple[int, Key] | None = None  # the last snapshot in the answer, and its key
    last_planned: int = field(init=False)

    def __post_init__(self) -> None:
        self.last_planned = self.planned[-1] if self.planned else 0

    def plan(self, position: int) -> None:
        """Note a position of a snapshot, between its computed tokens and the last planned one."""
        if position not in self.planned:
            insort(self.planned, position)

    def slots(self) -> list[int]:
        """Return the slots that are released with the sequence."""
        pending = [slot for _, slot in self.pending]
        return [self.own, *pending, *({self.read} - {self.own, None, *pending})]  # type: ignore[list-item]
