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
    except (ModelError, SettingsError) as error:
        for line in str(error).splitlines():
            click.echo(f"ropewalk: {line}", err=True)
        _tell_traceback()
        sys.exit(USAGE_ERROR)
    except click.exceptions.ClickException:
        raise
    except Exception as error:  # noqa: BLE001  # an error in the program itself
        first_line = str(error).strip().partition("\n")[0]
        click.echo(f"ropewalk: unexpected {type(error).__name__}: {first_line}", err=True)
        if not _tell_traceback():
            click.echo(f"ropewalk: set {TRACEBACK_VARIABLE}=1 to see where it came from", err=True)
        sys.exit(DIED)


def _tell_traceback() -> bool:
    """Print the traceback of the error being handled, if the operator has enabled that."""
    is_asked = bool(os.environ.get(TRACEBACK_VARIABLE))
    if is_asked:
        click.echo(traceback.format_exc(), err=True)
    return is_asked
