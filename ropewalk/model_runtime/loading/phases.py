"""The phases of a load, told to the caller as they begin."""

from collections.abc import Callable

# Called with the name of each phase when it begins.
OnPhase = Callable[[str], None]


def no_phases(_: str) -> None:
    """Ignore the phases of a load."""
