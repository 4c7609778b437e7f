"""Programs of other projects that tests run, and ports for them."""

import os
import shutil
import socket
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip the test without an optional part; in CI nothing may be missing."""
    reason = f"{what} is not installed"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def program(*names: str, package: str) -> str:
    """The path of the first of these programs; `package`: Debian's, for who has none of them."""
    folders = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"
    found = (path for name in names if (path := shutil.which(name, path=folders)) is not None)
    return next(found, None) or missing(f"{names[0]} (Debian's package {package})")


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
