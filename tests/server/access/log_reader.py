"""The lines of the access log, as a collector reads them."""

import json
import re
from collections.abc import Iterable
from typing import Any

import httpx

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


def request_lines(server: Server) -> list[dict[str, Any]]:
    """The fields of each request's line."""
    return [fields_of(line.rstrip("\n")) for line in list(server.log) if "event=request " in line]


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    """The only line of a request; an aborted one has it one step later than its response.

    Lines of earlier requests may still come, so a test takes those of its own.
    """

    def found() -> list[dict[str, Any]]:
        return [each for each in request_lines(server) if each["request_id"] == request_id]

    assert wait_for(lambda: bool(found())), server.log
    (line,) = found()
    return line


def lines_of(server: Server, answers: Iterable[httpx.Response]) -> list[dict[str, Any]]:
    """The line of each answer."""
    return [line_of(server, each.headers["x-request-id"]) for each in answers]
