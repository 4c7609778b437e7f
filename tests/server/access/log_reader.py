"""The lines of the access log, as a collector reads them."""

import ast
import re
from typing import Any

from tests.processes import Server
from tests.server.soak_watch import wait_for

_FIELD = re.compile(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S+)")


def request_lines(server: Server, first: int = 0) -> list[dict[str, Any]]:
    """The fields of each request's line, from the log's line `first` on."""
    return [
        {name: ast.literal_eval(value) for name, value in _FIELD.findall(line)}
        for line in list(server.log[first:])
        if "event='request'" in line
    ]


def awaited_lines(server: Server, first: int, num: int) -> list[dict[str, Any]]:
    """As many lines; an aborted request has its line one step later than its response."""
    assert wait_for(lambda: len(request_lines(server, first)) >= num), server.log[first:]
    return request_lines(server, first)
