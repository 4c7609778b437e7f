"""Outputs on their way from the engine's thread to the event loop: one wake for all of a step.

A wake makes the engine's thread let go of the interpreter, and get it back only when the loop has
nothing to do. One for each output would stop it once for each request of a batch.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

Letter = Callable[[], None]


class Mailbox:
    """Both methods are for the engine's thread."""

    def __init__(self) -> None:
        self._letters: dict[asyncio.AbstractEventLoop, list[Letter]] = {}

    def put(self, loop: asyncio.AbstractEventLoop, letter: Letter) -> None:
        """Have it called on the loop, behind those put before, at the next `send`."""
        self._letters.setdefault(loop, []).append(letter)

    def send(self) -> None:
        """Wake the loops that have letters."""
        sent, self._letters = self._letters, {}
        for loop, letters in sent.items():
            # The loop may be gone when the process is ending.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_open, letters)


def _open(letters: list[Letter]) -> None:
    for letter in letters:
        letter()
