"""Sentences for an operator about the parts and values of a checkpoint that are not used."""

from pathlib import Path

from ropewalk.model_runtime.loading.files.folder_files import ADAPTER, MERGE
from ropewalk.model_runtime.loading.generation_config import generation_of
from ropewalk.model_runtime.loading.model_config import ModelConfig


def notes_of(outline: ModelConfig) -> tuple[str, ...]:
    """Return a sentence for each part or value that is left out. Raises ModelError."""
    source, notes = Path(outline.source), []
    if outline.left_out:
        names, are = " and ".join(outline.left_out), "are" if len(outline.left_out) > 1 else "is"
        notes.append(f"served for text only: {names} {are} not read")
    if source.is_file():
        from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf  # noqa: PLC0415  # numpy
        from ropewalk.model_runtime.formats.gguf.gguf_tokenizer import ids_without_token  # noqa: PLC0415

        ignored = ids_without_token(read_gguf(source))
        if ignored:
            notes.append(f"{', '.join(ignored)}: the file has no such token, so it is ignored")
    elif (source / ADAPTER).is_file():
        notes.append(f"the adapter of {source / ADAPTER} is not served: {MERGE}")
    return (*notes, *generation_of(outline).left_out)
