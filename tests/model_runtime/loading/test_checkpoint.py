"""Folders that cannot be served get a sentence that names the fault."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model, to be broken."""
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    """A missing file is named before any weight is loaded."""
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"has no {name}"):
        load_checkpoint(folder)


def test_only_safetensors_are_read(folder: Path) -> None:
    """A pickle is refused because it may run code."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has neither .* \(only pytorch_model.bin"):
        load_checkpoint(folder)


def test_a_cut_file_is_named(folder: Path) -> None:
    """A file that a broken download has cut is named."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        load_checkpoint(folder)


def test_a_missing_weight_is_named(folder: Path) -> None:
    """A missing weight is named, because transformers would initialise it at random."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights, .*layers\.2\.mlp\.up_proj"):
        load_checkpoint(folder)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_with_nan_or_inf_is_named(folder: Path, bad: float) -> None:
    """One number that is NaN or Inf is enough to refuse a weight."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][3, 4] = bad
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj\.weight has NaN or Inf"):
        load_checkpoint(folder)


def test_an_unknown_architecture_is_a_sentence(folder: Path) -> None:
    """An unknown architecture gives a ModelError with the name of the model type."""
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "notyetknown"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="notyetknown"):
        load_checkpoint(folder)


def test_a_folder_that_is_not_there_is_a_sentence() -> None:
    """A name that begins with `./` cannot be the id of a model on the hub."""
    with pytest.raises(ModelError, match=r"there is no folder \./no-such-folder"):
        load_checkpoint("./no-such-folder")


def test_number_types(folder: Path) -> None:
    """On a CPU, auto is float32, bfloat16 passes the self-check to the bit, float16 is refused."""
    assert load_checkpoint(folder, device="cpu").dtype == torch.float32
    checkpoint = load_checkpoint(folder, dtype="bfloat16", device="cpu")
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.report.bitwise
    with pytest.raises(ModelError, match="float16 is not served on a CPU"):
        load_checkpoint(folder, dtype="float16", device="cpu")


def test_sampling_defaults_fill_what_a_request_leaves_out() -> None:
    """A request's fields win."""
    from ropewalk.server.api.completion_schema import CompletionRequest

    defaults = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    silent = CompletionRequest(prompt="a").sampling(defaults, ())
    assert (silent.temperature, silent.top_k, silent.repetition_penalty) == (0.6, 20, 1.1)
    body = CompletionRequest(prompt="a", temperature=0.0, top_k=-1)
    spoken = body.sampling(defaults, ())
    assert (spoken.temperature, spoken.top_k, spoken.top_p) == (0.0, 0, 1.0)
