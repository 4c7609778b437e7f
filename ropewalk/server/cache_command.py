"""`ropewalk cache stats PATH` and `ropewalk cache clear PATH`: the folder of --kv-disk."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ropewalk.model_runtime.engine.kv_disk.files.folder import FolderError, check_folder
from ropewalk.model_runtime.engine.kv_disk.files.janitor import PageEntry, Swept, entries, sweep
from ropewalk.model_runtime.loading.hub.local_model import is_there
from ropewalk.model_runtime.size_text import size_text

_HOUR_S = 3600.0
_SWEEP_S = 60.0  # for the janitor of a server to end


@contextmanager
def _opened(path: Path) -> Iterator[None]:
    """Check the folder; a fault in the block ends the command with a sentence."""
    try:
        check_folder(path, create=False)
    except FolderError as error:
        if not is_there(path):
            raise click.ClickException(f"there is no folder {path}") from error
        raise click.UsageError(f"PATH {error}") from error
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"cannot use {error.filename}: {error.strerror}") from error


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def stats(path: Path) -> None:
    """Show the number of pages in the folder PATH of --kv-disk, by model and settings.

    A row is the pages of one identity: weights, number type, page size and arithmetic. Pages of
    another identity than the server's are never read, and deleted when they are the oldest.
    """
    by_identity: dict[str, list[PageEntry]] = defaultdict(list)
    with _opened(path):
        for entry in entries(path):
            if not entry.is_part:
                by_identity[entry.path.parts[-3]].append(entry)
    click.echo(f"{'identity':<32} {'pages':>8} {'size':>10}  last used")
    newest_first = sorted(by_identity.items(), key=lambda each: -_last_use(each[1]))
    for identity, found in newest_first:
        size = size_text(sum(entry.num_bytes for entry in found))
        hours = max(0.0, time.time() - _last_use(found)) / _HOUR_S
        click.echo(f"{identity:<32} {len(found):>8,} {size:>10}  {hours:.1f} hours ago")
    every = [entry for found in by_identity.values() for entry in found]
    total = size_text(sum(entry.num_bytes for entry in every))
    click.echo(f"{'all':<32} {len(every):>8,} {total:>10}")


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def clear(path: Path) -> None:
    """Delete every page in the folder PATH of --kv-disk. Servers that use it go on.

    Files that are no pages stay, and so do those that a server is writing.
    """
    with _opened(path):
        swept = _sweep_all(path)
    click.echo(f"deleted {swept.num_evicted:,} pages, {size_text(swept.num_bytes_evicted)}")


def _sweep_all(path: Path) -> Swept:
    """Delete all pages when no janitor works. Raises ClickException if one does not end."""
    deadline = time.monotonic() + _SWEEP_S
    while (swept := sweep(path, 0)) is None:
        if time.monotonic() > deadline:
            raise click.ClickException(
                f"cannot clear {path}: a server has been sweeping it for {_SWEEP_S:.0f} s"
            )
        time.sleep(0.05)
    return swept


def _last_use(found: list[PageEntry]) -> float:
    return max(entry.used_s for entry in found)
