"""Servers of a test that end and start again at their address."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

from tests.servers.processes import Server, running_server


class Restarted:
    """A server that starts again at the port that it had."""

    def __init__(self, stack: ExitStack, *flags: str) -> None:
        self._own = ExitStack()
        stack.callback(self.close)
        self._flags = flags
        self.server: Server = self._own.enter_context(running_server(*flags))
        self.url = self.server.url

    def close(self) -> None:
        """End it if it runs."""
        self._own.close()

    def end(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal, and return when it has ended."""
        os.kill(self.server.pid, number)
        self._own.close()

    def start(self, *more: str) -> None:
        """Start it again, with further flags."""
        port = str(urlsplit(self.url).port)
        self._own = ExitStack()
        self.server = self._own.enter_context(running_server(*self._flags, *more, "--port", port))


@contextmanager
def restarted(num: int, *flags: str) -> Iterator[list[Restarted]]:
    """So many servers, which have ended when the block ends."""
    with ExitStack() as stack:
        yield [Restarted(stack, *flags) for _ in range(num)]
