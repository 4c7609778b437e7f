"""Make the fingerprint of a served model: everything that decides the bytes of its answers."""

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import draft_tokens
from ropewalk.model_runtime.engine.kv_disk.identity import (
    WeightFiles,
    arithmetic_facts,
    hashes_folder,
    identity_of,
    model_facts,
)
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.server.api.service import Fingerprint
from ropewalk.server.settings.load import ServeSettings

_ROOT = Path(__file__).parents[2]
# The sources that decide an answer's bytes.
_SOURCES = (
    *("rope", "model_runtime", "server/api", "server/turns"),
    "server/access/assigned_ids.py",
)
_LIBRARIES = ("jinja2", "llguidance", "pydantic", "tokenizers")  # beside those that compute
# Those of the deployments are in the fingerprint of each name. The others refuse requests, or
# decide when and where an answer is computed.
_SETTINGS = (
    *("override_generation_config", "reasoning", "stream_interval", "tool_format", "weights"),
)


def make_fingerprint(
    checkpoint: Checkpoint, config: EngineConfig, settings: ServeSettings, template: ChatTemplate
) -> Fingerprint:
    """Return the fingerprint of a loaded model. Raises OSError if its files have changed.

    It reads the weights' files, unless their hashes are kept from before.
    """
    assert checkpoint.source is not None
    known_in = hashes_folder(config)
    tokenizer = checkpoint.tokenizer
    model = {
        **model_facts(checkpoint, config),
        "weights": WeightFiles(checkpoint.source, checkpoint.versions).content(known_in=known_in),
        "tokenizer": hashlib.sha256(tokenizer.as_json()[0].encode()).hexdigest(),
        "special_tokens": {name: str(each) for name, each in tokenizer.special_tokens_map.items()},
        "ends": sorted(checkpoint.eos_token_ids),
        "sampling": dict(checkpoint.sampling_defaults),
        "templates": template.texts,
        "settings": {name: getattr(settings, name) for name in _SETTINGS},
        "sources": _hash_of_sources(),
    }
    arithmetic = {
        **arithmetic_facts(checkpoint, config),
        "libraries": [_version_of(name) for name in _LIBRARIES],
        "ranks": settings.tensor_parallel_size,
        **_facts_of_batches(checkpoint, config),
    }
    return Fingerprint(identity_of(model).hex(), identity_of(arithmetic).hex()[:32])


def _facts_of_batches(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, object]:
    """Return what decides bits only where a row's bits depend on the batch, as on a GPU."""
    if checkpoint.report.bitwise:
        return {}
    return {
        "device": (
            torch.cuda.get_device_name(checkpoint.device)
            if checkpoint.device.type == "cuda"
            else "cpu"
        ),
        "drafts": draft_tokens(checkpoint, config),
        "eager": config.enforce_eager,
    }


def _hash_of_sources() -> str:
    found = hashlib.sha256()
    for each in _SOURCES:
        at = _ROOT / each
        for path in sorted(at.rglob("*.py")) if at.is_dir() else [at]:
            found.update(f"{path.relative_to(_ROOT)}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def _version_of(library: str) -> str:
    try:
        return f"{library} {version(library)}"
    except PackageNotFoundError:
        return library
