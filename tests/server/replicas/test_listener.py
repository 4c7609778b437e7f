"""The loan of a listening socket to another process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.server.replicas.listener import ListenerLender, borrowed_listener

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED is Linux's")


def test_a_borrowed_socket_accepts_what_came_before() -> None:
    """A connection waits in the system's queue while nothing accepts."""
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lender = ListenerLender(listener, lambda: calls.append("before"))
        try:
            with socket.create_connection(listener.getsockname()) as client:
                with borrowed_listener(lender.path) as borrowed:
                    assert borrowed.proto == socket.IPPROTO_TCP
                    borrowed.settimeout(10)
                    connection, _ = borrowed.accept()
                    with connection:
                        connection.sendall(b"x")
                assert client.recv(1) == b"x"
            # The next borrower gets the same socket.
            with borrowed_listener(lender.path) as again:
                assert again.getsockname() == listener.getsockname()
            assert calls == ["before", "before"]
        finally:
            lender.close()
    with pytest.raises(OSError, match=r"refused|No such file"):
        borrowed_listener(lender.path)


_LEND_AND_DIE = """
import os, signal, socket
from ropewalk.server.replicas.listener import ListenerLender, borrowed_listener
with socket.create_server(("127.0.0.1", 0)) as listener:
    lender = ListenerLender(listener, lambda: None)
    borrowed_listener(lender.path).close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_linux
def test_a_killed_lender_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    """Its socket lies in no folder."""
    ended = subprocess.run(
        [sys.executable, "-c", _LEND_AND_DIE],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (-9, "")
    assert list(tmp_path.iterdir()) == []


@needs_linux
def test_no_other_user_borrows_or_lends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends compare the user that the system states for the other one with their own."""
    calls = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lender = ListenerLender(listener, lambda: calls.append("before"))
        user = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: user + 1)
        try:
            with pytest.raises(PermissionError, match=f"belongs to the user {user}"):
                borrowed_listener(lender.path)
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(10)
                asking.connect(lender.path)
                assert asking.recv(1) == b""
        finally:
            lender.close()
    assert calls == []
