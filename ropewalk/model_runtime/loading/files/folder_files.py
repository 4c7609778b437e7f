"""The files of a checkpoint's folder that a load reads, checked before anything is loaded."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.json_files import read_json, read_object
from ropewalk.model_runtime.loading.config_values import check_values

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model"  # of peft
MERGE = (
    "merge it into its model with peft (PeftModel.from_pretrained(model, adapter)"
    ".merge_and_unload().save_pretrained(folder)), and serve that folder with the model's tokenizer"
)
_LONGEST_NAME = 255  # of a file, on common systems


def check_files(folder: Path, *, has_weights: bool) -> None:
    """Raise ModelError that names a missing or broken file, before anything is loaded."""
    for path in (*folder.glob("*"), *folder.glob("additional_chat_templates/*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelError(f"{path} must be a file; a pipe, socket or device is not read")
    has_some = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    lacks_weights = has_weights and not has_some
    others = [each for each in folder.glob("*.safetensors") if not each.name.startswith("adapter")]
    lacks_model = (lacks_weights and not others) or not (folder / "config.json").is_file()
    if (folder / ADAPTER).is_file() and lacks_model:
        raise ModelError(f"{folder} has an adapter without its model: {MERGE}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no {name}")
    for name in ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        read_json(folder / name)  # refuses one that is nested too deeply
    check_values(folder / "config.json")
    if lacks_weights:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        beside = f" (only {', '.join(pickled)}, which may run code)" if pickled else ""
        raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}{beside}")
    for path in weight_files(folder) if has_weights else ():
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a whole safetensors file: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers loads: a single one, or those that the index names.

    Other files in the folder are ignored. Raises ModelError for an index that cannot be read or
    names a missing file.
    """
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    try:
        names = weight_map_files(index)
    except ValueError as error:
        raise ModelError(f"{index} is no index of weights") from error
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no {name}, which its index names")
    return [folder / name for name in names]


def is_of_model(name: str) -> bool:
    return not name.startswith(_ADAPTER_WEIGHTS)


def weight_map_files(index: Path) -> list[str]:
    """Return the file names that an index of weights lists, sorted.

    Raises ValueError, or ModelError if it is nested too deeply.
    """
    found = (read_object(index) or {}).get("weight_map")
    names: list[Any] = list(found.values()) if isinstance(found, dict) and found else [None]
    if not all(isinstance(each, str) and 0 < len(each) <= _LONGEST_NAME for each in names):
        raise ValueError(f"{index} has no weight_map of names")
    return sorted(set(names))


def check_index(folder: Path) -> None:
    """Raise ModelError for an index of weights in which transformers would find no metadata."""
    index = folder / INDEX
    if index.is_file() and not (folder / SINGLE).is_file():
        found = (read_object(index) or {}).get("metadata")
        if not isinstance(found, dict):
            raise ModelError(f"{index}: metadata must be an object, such as {{}}, got {found!r}")
