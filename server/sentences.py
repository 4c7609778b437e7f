"""The end of a command that cannot do its work: sentences for the user, and an exit code."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from model_runtime.errors import ModelError
from server.settings.load import TRACEBACK_VARIABLE, SettingsError

USAGE_ERROR, DIED = 2, 1


@contextmanager
def sentences() -> Iterator[None]:
    """End the command with code 2 and a line for each mistake if something cannot be served.

    An unexpected error is also printed as a sentence, and ends it with code 1. If
    ROPEWALK_TRACEBACK is set, both are followed by the traceback.
    """
    try:
        yield
    except click.exceptions.ClickException:
        raise
    except Exception as error:  # noqa: BLE001  # an error in the program itself
        lines, code = told(error)
        for line in lines:
            click.echo(f"ropewalk: {line}", err=True)
        if not _tell_traceback() and code == DIED:
            click.echo(f"ropewalk: set {TRACEBACK_VARIABLE}=1 to see where it came from", err=True)
        sys.exit(code)


def told(error: Exception) -> tuple[list[str], int]:
    """Return the lines that tell an error, and the exit code of a command that it ends."""
    if isinstance(error, ModelError | SettingsError):
        return str(error).splitlines(), USAGE_ERROR
    first_line = str(error).strip().partition("\n")[0]
    return [f"unexpected {type(error).__name__}: {first_line}"], DIED


def _tell_traceback() -> bool:
    """Print the traceback of the error being handled, if the operator has enabled that."""
    is_asked = bool(os.environ.get(TRACEBACK_VARIABLE))
    if is_asked:
        click.echo(traceback.format_exc(), err=True)
    return is_asked
