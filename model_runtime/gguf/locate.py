"""Find the GGUF file that a model's name means."""

from pathlib import Path

from model_runtime.errors import ModelError

_PROJECTOR = "mmproj"  # llama.cpp's prefix of files that hold an image encoder only


def find_gguf(source: str | Path, gguf_file: str | None = None) -> Path | None:
    """Return the file that a path means, or None if it is no GGUF model.

    `source` is a file, or a folder with one model in GGUF and no safetensors. `gguf_file` is the
    name of a file in the folder. Raises ModelError that names what to do.
    """
    path = Path(source)
    if path.is_file():
        return _file(path, gguf_file)
    if gguf_file is not None:
        if not path.is_dir():
            raise ModelError(
                f"gguf_file is {gguf_file}, but {source} is no folder here; download the file and "
                "name its path as the model"
            )
        if not (path / gguf_file).is_file():
            raise ModelError(f"{path} has no file {gguf_file} (gguf_file)")
        return _file(path / gguf_file, None)
    if path.suffix == ".gguf" and not path.is_dir():
        raise ModelError(f"there is no file {source}")
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    return _only(path)


def _file(path: Path, gguf_file: str | None) -> Path:
    from model_runtime.gguf.file import MAGIC, first_part, is_gguf  # noqa: PLC0415  # needs numpy

    if gguf_file is not None:
        raise ModelError(f"{path} is a file already, so gguf_file must not be set")
    try:
        begins_well = is_gguf(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if not begins_well:
        raise ModelError(
            f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}; name a GGUF file or "
            "a model folder"
        )
    first = first_part(path)
    if not first.is_file():
        raise ModelError(f"{path} is a part of a split model, and {first.name} is not beside it")
    return first


def _only(folder: Path) -> Path | None:
    """Return the one model of a folder; parts of a split file count once."""
    found = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith(_PROJECTOR))
    if not found:
        return None
    from model_runtime.gguf.file import first_part  # noqa: PLC0415

    models = {first_part(path): path for path in found}
    if len(models) > 1:
        names = ", ".join(path.name for path in sorted(models)[:8])
        raise ModelError(
            f"{folder} holds {len(models)} GGUF models ({names}); choose one with gguf_file"
        )
    return _file(found[0], None)
