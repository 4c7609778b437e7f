"""The listening socket of the command, on loan to the API process of the same machine.

The command keeps the socket open. If the API process ends, connections wait in the system's queue
until the next one accepts them, so none is refused.
"""

import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_TIMEOUT_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer


class ListenerLender:
    """Gives the socket to each process of this user that asks at `path`."""

    def __init__(self, listener: socket.socket, before: Callable[[], None]) -> None:
        """Begin to lend. `before` is called before the socket is given."""
        self._listener, self._before = listener, before
        self._folder: str | None = None
        if sys.platform == "linux":
            # It lies in no folder, so it ends with this process, even by SIGKILL.
            self.path = f"\0ropewalk-listener-{secrets.token_hex(16)}"
        else:
            # Only this user may enter the folder.
            self._folder = tempfile.mkdtemp(prefix="ropewalk-")
            self.path = str(Path(self._folder) / "listener")
        self._asked = socket.socket(socket.AF_UNIX)
        self._asked.bind(self.path)
        self._asked.listen()
        threading.Thread(target=self._lend, name="listener-lender", daemon=True).start()

    def close(self) -> None:
        """Lend no longer."""
        with suppress(OSError):
            self._asked.shutdown(socket.SHUT_RDWR)
        self._asked.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _lend(self) -> None:
        while True:
            try:
                asking, _ = self._asked.accept()
            except OSError:  # closed
                return
            with asking, suppress(OSError):
                _check_user(asking)
                self._before()
                socket.send_fds(asking, [b"l"], [self._listener.fileno()])


def borrowed_listener(path: str) -> socket.socket:
    """Return the listening socket of the command that lends it at `path`. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_TIMEOUT_S)
        asking.connect(path)
        _check_user(asking)
        _, found, _, _ = socket.recv_fds(asking, 1, 1)
    if not found:
        raise OSError(f"no socket came from {path}")
    # asyncio looks at the protocol, which `socket.socket(fileno=...)` reads from the system.
    listener = socket.socket(fileno=found[0])
    listener.setblocking(False)  # noqa: FBT003  # its only argument
    return listener


def _check_user(connected: socket.socket) -> None:
    """Raise PermissionError if the other end belongs to another user.

    A path of Linux that lies in no folder can be connected to by every user.
    """
    if sys.platform != "linux":
        return
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise PermissionError(f"the other end of the socket belongs to the user {user}")
