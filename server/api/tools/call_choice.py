"""The choice of a turn: whether its answer may or must have calls, and of which functions."""

from dataclasses import dataclass
from typing import Literal, Self

ChoiceMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class CallChoice:
    """A client's `tool_choice`, in whichever words its API has for it."""

    mode: ChoiceMode = "auto"
    names: frozenset[str] | None = None  # of the functions that may be called; None: all
    is_named: bool = False  # the client has named the one function to call

    @classmethod
    def of_one(cls, name: str) -> Self:
        return cls("required", frozenset([name]), is_named=True)
