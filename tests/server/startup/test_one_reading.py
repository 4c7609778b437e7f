"""A config is read once: `config check`, `inspect`, the load and transformers find the same."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.model_config import read_model_config
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.probing.untouched import rotary_modules
from ropewalk.rope import ALL_LAYERS
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.load_service import load_served
from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of
from ropewalk.studies.inspection.options import InspectOptions
from ropewalk.studies.inspection.report import inspect_model
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.tokens import byte_tokenizer_fast

TYPES = (
    *("apertus", "arcee", "ernie4_5", "gemma3_text", "granite", "llama", "mistral", "olmo2"),
    *("phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
)
# Lengths, heads' width, tied weights and the base are left out.
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "a base": {"rope_theta": 5e5},
    "an older word": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn without its length": {
        "max_position_embeddings": 256,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
    "llama3": {
        "max_position_embeddings": 512,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64},
    },
    "both names": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
    "linear without a factor": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
    "a part of each head": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", TYPES)
def test_tables_are_those_of_transformers(kind: str, block: str, tmp_path: Path) -> None:
    """To the bit, from configs that leave fields out; what transformers refuses is refused."""
    values = {"model_type": kind, **SHAPE, **BLOCKS[block]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    byte_tokenizer_fast().save_pretrained(tmp_path)
    try:
        config = AutoConfig.from_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001  # of any type
        with pytest.raises(ModelError):
            read_model_config(tmp_path, device="cpu", has_weights=False).native()
        return
    outline = read_model_config(tmp_path, device="cpu", has_weights=False)
    try:
        expected = read_native_rope(model)
    except ModelError as error:  # a load ends with it
        with pytest.raises(ModelError, match=f"^{re.escape(str(error))}$"):
            outline.native()
        return
    assert outline.native() == expected
    for module, types in rotary_modules(model).values():
        for name in types:
            prefix = "" if name == ALL_LAYERS else f"{name}_"
            table = expected.tables[name if name in expected.tables else ALL_LAYERS].frequencies()
            assert torch.equal(table.inv_freq_P, getattr(module, f"{prefix}inv_freq"))
    assert outline.num_parameters() == _num_numbers(model)
    assert outline.architecture == type(model).__name__


def _num_numbers(model: Any) -> int:
    """The numbers of a model's files; a tied head counts once."""
    held = {id(each): each for each in model.state_dict(keep_vars=True).values()}
    return sum(each.numel() for each in held.values())


def _left_out(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the fields that have their default anyway."""
    plain = AutoConfig.for_model(config["model_type"]).to_dict()
    kept = ("model_type", "architectures", *SHAPE)
    return {
        name: each
        for name, each in config.items()
        if name in kept or name not in plain or plain[name] != each
    }


def _shared(lines: list[str]) -> Iterator[str]:
    """The lines that do not depend on a load, or on the memory that is free at the moment."""
    ends = ("kernels", "drafts", "self-check", "memory", "would listen on", "not checked")
    return (each for each in lines if not each.startswith(tuple(f"  {name} " for name in ends)))


@pytest.mark.parametrize("kind", ["gemma3_text", "llama", "qwen3_moe", "smollm3"])
def test_the_commands_print_what_a_load_finds(kind: str, tmp_path: Path) -> None:
    """Rotation, tiers, lengths, cache and template, line by line."""
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    byte_tokenizer_fast().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_left_out(json.loads(path.read_text()))))
    given = {"model": str(tmp_path), "device": "cpu", "kv_cache_tokens": "2048"}
    settings = load_settings({**given, "page_size": "16"})
    loaded = load_served(settings)
    checked = outlook_lines(settings, outlook_of(settings))
    assert list(_shared(checked)) == list(_shared(loaded.served.banner.split("\n")))
    report = json.loads(inspect_model(settings, InspectOptions(as_json=True)).text)
    plan = loaded.served.plan
    assert report["native_len"] == loaded.checkpoint.native.trained.native_len
    assert report["rope_theta"] == loaded.checkpoint.native.rotary.rope_theta
    assert report["costs"]["kv_bytes_per_token"] == plan.layout.token_bytes
    assert report["costs"]["num_parameters"] == _num_numbers(model)
