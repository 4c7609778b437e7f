"""The end of a command that cannot do its work: sentences for the user, and an exit code."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from ropewalk.model_runtime.errors import ModelError
from ropewalk.server.settings.load import TRACEBACK_VARIABLE, SettingsError
from ropewalk.server.wording import printable, printable_sentence

USAGE_ERROR, DIED = 2, 1
HINT = f"set {TRACEBACK_VARIABLE}=1 to see where it came from"


class Teller:
    """Prints a command's lines on standard error, as text or as JSON objects of the log."""

    def __init__(self) -> None:
        self._log: Any = None

    def use_json(self, log: Any) -> None:
        """Write events to a logger of structlog from now on."""
        self._log = log

    def say(self, line: str) -> None:
        """Print a line of information."""
        if self._log is None:
            click.echo(printable(line), err=True)
        else:
            self._log.info("start", message=line)

    def tell_of_imports(self) -> None:
        """Print a line if torch and transformers are still to be imported, which takes seconds."""
        if not {"torch", "transformers"} <= sys.modules.keys():
            self.say("importing torch and transformers")

    def ready(self, version: str, banner: str, url: str) -> None:
        """Print what is served where."""
        if self._log is None:
            self.say(f"ropewalk {version}\n{banner}\n  listening on     {url}")
        else:
            lines = [line.strip() for line in banner.splitlines()]
            self._log.info("ready", version=version, url=url, banner=lines)

    def fail(self, line: str) -> None:
        """Print a sentence about what ends the command."""
        if self._log is None:
            click.echo(f"ropewalk: {printable_sentence(line)}", err=True)
        else:
            self._log.error("refused", message=line)


@contextmanager
def sentences(teller: Teller | None = None) -> Iterator[Teller]:
    """End the command with code 2 and a line for each mistake if something cannot be served.

    An unexpected error is also printed as a sentence, and ends it with code 1. If
    ROPEWALK_TRACEBACK is set, both are followed by the traceback. The block may change how the
    yielded teller prints, which is `teller` if it is given.
    """
    teller = teller or Teller()
    try:
        yield teller
    except click.exceptions.ClickException:
        raise
    except Exception as error:  # noqa: BLE001  # an error in the program itself
        lines, code = told(error)
        for line in lines:
            teller.fail(line)
        if os.environ.get(TRACEBACK_VARIABLE):
            teller.say(traceback.format_exc())
        elif code == DIED:
            teller.fail(HINT)
        sys.exit(code)


def told(error: Exception) -> tuple[list[str], int]:
    """Return the lines that tell an error, and the exit code of a command that it ends."""
    if isinstance(error, ModelError | SettingsError):
        return str(error).split("\n"), USAGE_ERROR
    first_line = str(error).strip().partition("\n")[0]
    return [f"unexpected {type(error).__name__}: {first_line}"], DIED
