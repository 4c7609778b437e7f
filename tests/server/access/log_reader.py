"""The lines of the access log, as a collector reads them."""

import json
import re
from typing import Any

from tests.server.load.soak_watch import wait_for
from tests.servers.processes import Server

# As Loki, Datadog and Go's logfmt have it: a value with a space, an equals sign or a quotation mark
# is a string of JSON.
_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]*)(?: |$)')


def fields_of(line: str) -> dict[str, Any]:
    """The fields of a line of logfmt, which must be nothing else."""
    found, at = {}, 0
    while at < len(line):
        pair = _PAIR.match(line, at)
        assert pair is not None, f"no logfmt from character {at}: {line}"
        found[pair[1]] = _value(pair[2])
        at = pair.end()
    return found


def _value(text: str) -> Any:
    if text.startswith('"'):
        return json.loads(text)
    named = {"": None, "true": True, "false": False}
    if text in named:
        return named[text]
    try:
        return float(text) if re.search("[.e]", text) else int(text)
    except ValueError:
        return text


def request_lines(server: Server, first: int = 0) -> list[dict[str, Any]]:
    """The fields of each request's line, from the log's line `first` on."""
    return [
        fields_of(line.rstrip("\n"))
        for line in list(server.log[first:])
        if "event=request " in line
    ]


def awaited_lines(server: Server, first: int, num: int) -> list[dict[str, Any]]:
    """As many lines; an aborted request has its line one step later than its response."""
    assert wait_for(lambda: len(request_lines(server, first)) >= num), server.log[first:]
    return request_lines(server, first)
