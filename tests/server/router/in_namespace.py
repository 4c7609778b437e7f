"""`python -m tests.server.router.in_namespace serve ...`: ropewalk in another network namespace.

The variable TEST_NAMESPACE names it, as `ip netns` does.
"""

import ctypes
import os
from pathlib import Path

MODULE = "tests.server.router.in_namespace"
VARIABLE = "TEST_NAMESPACE"
_NETWORK = 0x40000000  # CLONE_NEWNET


def enter(name: str) -> None:
    """Move this thread, and those that it starts, into a namespace. Raises OSError."""
    with Path("/run/netns", name).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    enter(os.environ[VARIABLE])
    from ropewalk.__main__ import main

    main()
