"""Every command logs in one format."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.server.access.log_reader import fields_of

_LIBRARY_LINES = """
from ropewalk.server.log_lines import log_to_stderr
log_to_stderr()
import sys
assert not {"uvicorn", "transformers"} & set(sys.modules)
import logging, uvicorn
from transformers.utils import logging as of_transformers
from ropewalk.server.settings.load import ServeSettings
from ropewalk.server.startup.lifecycle import _uvicorn_config
_uvicorn_config(ServeSettings(), object())
of_transformers.get_logger("transformers.some").warning("is %s", 1)
try:
    raise ValueError("broken")
except ValueError:
    logging.getLogger("uvicorn.error").exception("failed")
logging.getLogger("uvicorn.error").info("not told")
"""


@pytest.mark.long
def test_lines_of_libraries_have_the_format_of_ours() -> None:
    """Each stands once, though transformers hands its lines to other loggers with CI=true."""
    ended = subprocess.run(
        [sys.executable, "-c", _LIBRARY_LINES],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CI": "true"},
    )
    told = [re.sub("^timestamp=\\S+ ", "", line) for line in ended.stderr.splitlines()]
    assert told[0] == (
        'level=warning event=library_message logger=transformers.some message="is 1"'
    )
    assert "level=error event=library_message logger=uvicorn.error message=failed" in told[1]
    assert "ValueError: broken" in told[1]
    assert len(told) == 2


_HOSTILE_LINES = r"""
import sys
from ropewalk.server.log_lines import log_to_stderr
log_to_stderr(*sys.argv[1:])
import logging, structlog, warnings
log = structlog.get_logger("x")
log.debug("least")
text = 'a "b" c\\d=e\nlevel=error event=forged'
log.info("hostile", text=text, escape="\x1b]0;pwned\x07", tab="\t", none=None, flag=True,
         number=1.5, empty="", unicode="\u00e9\u2028", path="C:\\new")
warnings.warn("of Python")
logging.getLogger("asyncio").error("of another library")
logging.getLogger("asyncio").log(35, "of a level of its own")
try:
    raise ValueError("first\nsecond")
except ValueError:
    log.exception("failed")
"""


def lines_of(*arguments: str) -> list[str]:
    """The log of hostile values in a format and from a level on."""
    ended = subprocess.run(
        [sys.executable, "-c", _HOSTILE_LINES, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == ""
    assert "\x1b" not in ended.stderr
    assert "\x07" not in ended.stderr
    return ended.stderr.splitlines()


def test_logfmt_holds_any_value_in_one_line() -> None:
    """A value cannot forge a field or a line, and steers no terminal."""
    hostile, warning, other, odd, failed = map(fields_of, lines_of())
    assert list(hostile)[:3] == ["timestamp", "level", "event"]
    assert hostile["text"] == 'a "b" c\\d=e\nlevel=error event=forged'
    assert hostile["escape"] == "\\x1b]0;pwned\\x07"
    assert (hostile["event"], hostile["flag"], hostile["number"]) == ("hostile", True, 1.5)
    assert (hostile["none"], hostile["unicode"]) == (None, "\u00e9\\u2028")
    assert hostile["path"] == "C:\\new"
    assert warning["logger"] == "py.warnings"
    assert "UserWarning: of Python" in warning["message"]
    assert other["message"] == "of another library"
    assert (odd["level"], odd["message"]) == ("warning", "of a level of its own")
    assert failed["exception"].endswith("ValueError: first\nsecond")


def test_json_holds_any_value_in_one_line() -> None:
    """Each line is an object, with the values as they are."""
    hostile, _, other, _, failed = map(json.loads, lines_of("json"))
    assert hostile["text"] == 'a "b" c\\d=e\nlevel=error event=forged'
    assert (hostile["escape"], hostile["tab"]) == ("\x1b]0;pwned\x07", "\t")
    assert (hostile["none"], hostile["flag"], hostile["number"]) == (None, True, 1.5)
    assert (other["level"], other["logger"]) == ("error", "asyncio")
    assert failed["exception"].endswith("ValueError: first\nsecond")


def test_a_level_leaves_out_lower_ones() -> None:
    """The four levels have all, all but one, and so on."""
    found = [len(lines_of("json", level)) for level in ("debug", "info", "warning", "error")]
    assert found == [6, 5, 4, 2]


def test_lines_that_cannot_be_written_are_lost_without_an_error() -> None:
    """Standard error is a full disk, or closed; the last word on standard output is reached."""
    code = (
        _HOSTILE_LINES
        + """
import click
click.echo("of a command", err=True)
print("of Python", file=sys.stderr)
sys.stderr.flush()
print("the end")
"""
    )
    for redirected in ("2>/dev/full", "2>&-"):
        ended = subprocess.run(
            ["/bin/sh", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, code],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert ended.stdout == "the end\n"


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-"])
def test_no_socket_gets_the_number_of_a_closed_standard_file(closed: str) -> None:
    """Lines of the log, or of a process that is started later, would be written to a client."""
    code = """
import socket, subprocess, sys
from ropewalk.server.log_lines import log_to_stderr
log_to_stderr()
number = socket.socket().fileno()
print("of Python", file=sys.stderr, flush=True)
started = subprocess.run(["/bin/sh", "-c", "echo said; echo said >&2"])
sys.exit(number if started.returncode == 0 else 99)
"""
    ended = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert 2 < ended.returncode < 99
