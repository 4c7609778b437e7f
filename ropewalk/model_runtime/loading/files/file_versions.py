"""Note the files that a loader reads, so that a later look tells whether one was written again."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ropewalk.model_runtime.formats.gguf.gguf_weights import find_gguf

# Files that a loader reads beside weights.
_CONFIGS = ("config.json", "quantize_config.json", "quantization_config.json")


def file_versions(source: str | Path) -> Mapping[Path, str | None]:
    """Return the version of each file that decides a model's numbers, in a fixed order.

    `source` is as for a load. The version of a file that cannot be looked at is None, and a source
    that is absent has no files. Raises ModelError if it is ambiguous.
    """
    found: dict[Path, str | None] = {}
    with suppress(OSError):
        for path in _files_of(find_gguf(source) or Path(source)):
            found[path] = None
            with suppress(OSError):
                found[path] = version_of(path.stat())
    return found


def version_of(facts: os.stat_result) -> str:
    """Return the text that differs once a file was written again or replaced."""
    place = f"{facts.st_dev} {facts.st_ino} {facts.st_size}"
    return f"{place} {facts.st_mtime_ns} {facts.st_ctime_ns}"


def _files_of(source: Path) -> Iterator[Path]:
    if source.is_file():
        from ropewalk.model_runtime.formats.gguf.gguf_file import (  # noqa: PLC0415  # only for such a file
            named_parts,
        )

        yield from named_parts(source)
        return
    for path in sorted(source.iterdir()):
        if path.suffix in {".safetensors", ".py"} or path.name in _CONFIGS:
            yield path
