"""What a checkpoint says about generation: sampling defaults and end tokens.

A folder has generation_config.json, and a GGUF file `general.sampling.*`. Values that no request
may have are left out, and a sentence says so. Neither torch nor transformers is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.model_runtime.json_files import read_object
from ropewalk.model_runtime.loading.config_values import text_values
from ropewalk.model_runtime.loading.model_config import ModelConfig
from ropewalk.model_runtime.sampling_limits import SAMPLING_LIMITS

_FILE = "generation_config.json"
# Keys of a GGUF file -> our names.
_GGUF_KEYS = {
    f"general.sampling.{key}": name
    for key, name in {
        **{name: name for name in ("top_k", "top_p", "min_p")},
        "temp": "temperature",
        "penalty_repeat": "repetition_penalty",
    }.items()
}
_MAX_SHOWN, _MAX_IDS = 64, 8  # characters of a value, and ids, in a sentence


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The usable part of what a checkpoint says."""

    sampling: Mapping[str, float]  # by SamplingParams' names
    end_ids: frozenset[int]  # beside the tokenizer's own end token
    left_out: tuple[str, ...]  # a sentence for each value that is not used


def generation_of(outline: ModelConfig) -> GenerationDefaults:
    """Read what a checkpoint says. Raises ModelError for a file that cannot be read at all."""
    source = Path(outline.source)
    if source.is_file():
        from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf  # noqa: PLC0415

        found = read_gguf(source).metadata
        sampling, left_out = _sampling(source.name, found, _GGUF_KEYS)
        return GenerationDefaults(sampling, frozenset(), tuple(left_out))
    config, path = text_values(outline.config), source / _FILE
    stated, unread = read_object(path), list[str]()
    if stated is None and path.exists():
        unread = [f"{_FILE} is no JSON object; it is left out"]
    name = "config.json" if stated is None else _FILE
    ids = (config if stated is None else stated).get("eos_token_id")
    end_ids, wrong_ids = _end_ids(name, ids, config.get("vocab_size"))
    sampling, left_out = _sampling(_FILE, stated or {}, {each: each for each in SAMPLING_LIMITS})
    return GenerationDefaults(sampling, end_ids, (*unread, *wrong_ids, *left_out))


def _sampling(
    file: str, stated: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[dict[str, float], list[str]]:
    """Return the usable values by our names, and a sentence for each of the others.

    `names`: the file's names of them -> ours.
    """
    usable: dict[str, float] = {}
    left_out: list[str] = []
    for key, name in names.items():
        value: Any = stated.get(key)
        limit = SAMPLING_LIMITS[name]
        if limit.admits(value):
            usable[name] = value if limit.is_integer else float(value)
        elif value is not None:
            told = f"{file}: {key} must be {limit}, got {_shown(value)}"
            left_out.append(f"{told}; left out, and the default of requests applies")
    return usable, left_out


def _end_ids(file: str, stated: Any, num_rows: Any) -> tuple[frozenset[int], list[str]]:
    """Return the usable ids, and a sentence if there are others."""
    listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
    usable = {each for each in listed if type(each) is int and 0 <= each < num_rows}
    wrong = [each for each in listed if type(each) is not int or each not in usable]
    if not wrong:
        return frozenset(usable), []
    told = f"{file}: eos_token_id must have token ids from 0 to {num_rows - 1}"
    got = ", ".join(map(_shown, wrong[:_MAX_IDS]))
    return frozenset(usable), [f"{told}, got {got}; left out, and the other end tokens apply"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
