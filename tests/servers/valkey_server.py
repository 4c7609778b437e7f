"""A real store of keys and values on this machine: valkey-server, or redis-server; always ended."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.programs import free_port, program

_START_S = 30
_STOP_S = 20


class RunningStore:
    """A store that listens on a port of its own; it can be stopped, killed and started again."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """Keep its log in a folder; `arguments` are further ones of its command line."""
        self.port = free_port()
        self.url = f"valkey://127.0.0.1:{self.port}"
        self._log = folder / "store.log"
        self._command = [
            *(binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", "--logfile", str(self._log), *arguments),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while True:
            assert process.poll() is None, self._log.read_text()
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a crash does; what it held is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_S)
            self._process = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let it answer nothing until the block ends; its connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


def binary() -> str:
    return program("valkey-server", "redis-server", package="valkey-server")


@contextmanager
def running_store(folder: Path, *arguments: str) -> Iterator[RunningStore]:
    """Run a store until the block ends."""
    store = RunningStore(folder, *arguments)
    try:
        store.start()
        yield store
    finally:
        store.kill()
