"""The processes of ranks 1 to N - 1, started and watched by rank 0, which is the serving process.

Every follower ends with rank 0: its end of a socket closes, and Linux kills it. If a follower ends,
then all of them are ended, because none can compute without the others, and rank 0 hears of it.
"""

import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import structlog

from ropewalk.model_runtime.child_process import command_of
from ropewalk.model_runtime.parallel.wire import Kind, Link

_DIED = 1  # exit code, as of an engine that died
_END_S = 2.0  # for followers to end by themselves
_HANDLING_S = 5.0  # for a load that fails because a follower has ended

_log = structlog.get_logger(__name__)


class Followers:
    """Rank 0's view of the other processes. `send` is called by one thread at a time."""

    def __init__(self, size: int, store: int) -> None:
        """Start `size` - 1 processes, which inherit the file `store`. Raises OSError."""
        self._store = store
        self.fault: str | None = None  # why the first follower ended
        self._links: dict[Link, int] = {}  # -> rank
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._on_loss: Callable[[str], None] = self._end_process
        self._is_closing = threading.Event()
        self._lost = threading.Event()
        started, problems = threading.Event(), list[OSError]()
        self._keeper = threading.Thread(
            target=self._keep, args=(size, started, problems), name="followers", daemon=True
        )
        self._keeper.start()
        started.wait()
        for problem in problems:
            raise problem

    def on_loss(self, call: Callable[[str], None]) -> None:
        """Call this with a sentence when a follower has ended; at once if one has."""
        self._on_loss = call
        if self.fault is not None and not self._is_closing.is_set():
            call(self.fault)

    def wait_for_fault(self, timeout_s: float) -> str | None:
        """Return why a follower has ended; None if none has within the time."""
        self._lost.wait(timeout_s)
        return self.fault

    def send(self, kind: Kind, content: bytes) -> None:
        """Send a message to every follower. Raises OSError if one has ended."""
        for link in self._links:
            link.send(kind, content)

    def senders(self) -> list[Callable[[Kind, bytes], None]]:
        return [link.send for link in self._links]

    def close(self) -> None:
        """End all followers."""
        self._is_closing.set()
        for link in self._links:
            link.shut()
        for process in self._processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._keeper.join(_END_S)
        for link in self._links:
            link.close()

    def _keep(self, size: int, started: threading.Event, problems: list[OSError]) -> None:
        """Start the processes, then read what they say until one ends.

        One thread does both, because Linux kills a child when the thread that started it ends.
        """
        selector = selectors.DefaultSelector()
        try:
            for rank in range(1, size):
                link = self._start(rank)
                self._links[link] = rank
                selector.register(link, selectors.EVENT_READ, link)
        except OSError as error:
            problems.append(error)
        finally:
            started.set()
        while True:
            for key, _ in selector.select():
                follower: Link = key.data
                message = follower.receive()
                if message is None:
                    self._lose(self._links[follower])
                    self._is_closing.wait()  # the processes end with this thread
                    return
                if self.fault is None:
                    self.fault = f"rank {self._links[follower]}: {message[1].decode()}"

    def _start(self, rank: int) -> Link:
        own, theirs = socket.socketpair()
        with theirs:
            self._processes[rank] = subprocess.Popen(  # noqa: S603  # this interpreter
                [
                    *command_of("ropewalk.model_runtime.parallel.follower"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                pass_fds=[theirs.fileno(), self._store],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
            )
        return Link(own)

    def _lose(self, rank: int) -> None:
        if self._is_closing.is_set():
            return
        if self.fault is None:
            try:
                code = self._processes[rank].wait(_END_S)
            except subprocess.TimeoutExpired:
                code = 0
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            self.fault = f"rank {rank} (process {self._processes[rank].pid}) {how}"
        for process in self._processes.values():
            process.kill()
        self._lost.set()
        self._on_loss(self.fault)

    def _end_process(self, fault: str) -> None:
        """End this process, unless the load that now fails closes the followers."""
        if not self._is_closing.wait(_HANDLING_S):
            _log.error("follower_lost", problem=fault)
            sys.stderr.flush()
            os._exit(_DIED)
