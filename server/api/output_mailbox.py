"""The output queue from the engine's thread to the event loop, with one wakeup per step.

A wakeup makes the engine's thread release the interpreter lock, which it gets back only when the
loop is idle. A wakeup for each output would stop the thread once for each request of a batch.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

Letter = Callable[[], None]


class Mailbox:
    """An output queue; both methods must be called on the engine's thread."""

    def __init__(self) -> None:
        self._letters: dict[asyncio.AbstractEventLoop, list[Letter]] = {}

    def put(self, loop: asyncio.AbstractEventLoop, letter: Letter) -> None:
        """Queue a callback that the loop runs in order after the next `send`."""
        self._letters.setdefault(loop, []).append(letter)

    def send(self) -> None:
        """Wake each event loop that has queued callbacks, once."""
        sent, self._letters = self._letters, {}
        for loop, letters in sent.items():
            # The loop may be closed when the process is ending.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_open, letters)


def _open(letters: list[Letter]) -> None:
    for letter in letters:
        letter()
