"""`ropewalk cache stats PATH` and `ropewalk cache clear PATH`: the folder of --kv-disk."""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ropewalk.model_runtime.engine.kv_disk.folder import (
    FolderError,
    PageEntry,
    delete_pages,
    entries,
    open_root,
)
from ropewalk.model_runtime.size_text import size_text

_HOUR_S = 3600.0


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the folder for the block; a fault ends the command with a sentence."""
    try:
        root = open_root(path, create=False)
    except FolderError as error:
        raise click.UsageError(f"PATH {error}") from error
    try:
        yield root
    finally:
        os.close(root)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def stats(path: Path) -> None:
    """Show how many pages the folder PATH of --kv-disk holds, by model and settings.

    A row is the pages of one identity: weights, number type, page size and arithmetic. Pages of
    another identity than the server's are never read, and deleted when they are the oldest.
    """
    by_identity: dict[str, list[PageEntry]] = defaultdict(list)
    with _opened(path) as root:
        for entry in entries(root):
            if not entry.is_part:
                by_identity[entry.path.split("/")[1]].append(entry)
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

    Files that are no pages stay.
    """
    with _opened(path) as root:
        num_pages, num_bytes = delete_pages(root)
    click.echo(f"deleted {num_pages:,} pages, {size_text(num_bytes)}")


def _last_use(found: list[PageEntry]) -> float:
    return max(entry.used_s for entry in found)
