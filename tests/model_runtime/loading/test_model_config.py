"""The numbers that a config gives before the weights are loaded, against the loaded model."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.packed_linear import products_of
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import (
    EMBEDDED_MODEL,
    ModelConfig,
    read_model_config,
    torch_device,
)
from tests.checkpoints.tiny_models import tiny_config


def test_the_embedded_model(embedded: Checkpoint) -> None:
    """The embedded model's tables, cache bytes and weight bytes are compared."""
    outline = read_model_config(EMBEDDED_MODEL)
    assert outline.architecture == "LlamaForCausalLM"
    assert outline.native() == embedded.native
    layouts = outline.cache_layout(64, "auto"), embedded.cache_layout(64, "auto")
    assert layouts[0].token_bytes == layouts[1].token_bytes
    from safetensors.torch import load_file

    weights = load_file(Path(EMBEDDED_MODEL) / "model.safetensors")
    num_parameters = sum(math.prod(each.shape) for each in weights.values())
    num_parameters += weights["model.embed_tokens.weight"].numel()  # tied, and packed as the head
    assert outline.num_weight_bytes() == 4 * num_parameters
    assert (
        read_model_config(EMBEDDED_MODEL, dtype="bfloat16").num_weight_bytes() == 2 * num_parameters
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_holds_the_stated_bytes(dtype: str) -> None:
    """The loaded memory is what torch and the packed products hold; panels are padded a little.

    The embedding keeps its weight, and the tied head has a packed copy of it.
    """
    outline = read_model_config(EMBEDDED_MODEL, dtype=dtype)
    model = load_checkpoint(EMBEDDED_MODEL, dtype=dtype).model
    products = {id(each): each for each in products_of(model)}
    head: Any = model.get_submodule("lm_head")
    assert id(head.product) in products
    packed = [each._panels for each in products.values() if each._panels is not None]
    assert len(packed) == len(products)
    held = sum(each.packed_Q.nbytes for each in packed)
    held += sum(each.nbytes for each in model.parameters() if each.device.type != "meta")
    stated = outline.num_weight_bytes()
    assert stated is not None
    assert stated <= held < 1.01 * stated
    assert outline.num_tied_head_bytes() == pytest.approx(head.product._panels.packed_Q.nbytes)


def test_a_head_is_copied_only_on_a_cpu_and_only_if_it_is_tied() -> None:
    """Elsewhere the head and the embedding are one tensor; an untied head is a parameter."""
    outline = read_model_config(EMBEDDED_MODEL)
    assert replace(outline, device=torch.device("cuda")).num_tied_head_bytes() == 0
    outline.config.tie_word_embeddings = False
    assert outline.num_tied_head_bytes() == 0
    assert outline.num_weight_bytes() == 4 * (outline.num_parameters() or 0)


def test_only_the_files_that_are_loaded_count(tmp_path: Path) -> None:
    """A copy in another layout may be in the folder; an index names its shards."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    expected = read_model_config(folder).num_weight_bytes()
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert read_model_config(folder).num_weight_bytes() == expected
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert read_model_config(folder).num_weight_bytes() == expected
    index.write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    with pytest.raises(ModelError, match=r"has no model-00002-of-00002\.safetensors, which its"):
        read_model_config(folder)
    index.write_text("{}")
    with pytest.raises(ModelError, match="is no index of weights"):
        read_model_config(folder)


def test_a_config_without_a_number_is_a_sentence() -> None:
    """Key heads listed by layer are refused, because one number would be a guess."""

    class Odd(PretrainedConfig):
        """A config whose key heads are a list by layer."""

        model_type = "odd"

    config = Odd(num_attention_heads=4, num_key_value_heads=[2, 4], num_hidden_layers=2)
    with pytest.raises(ModelError, match="odd: the config's num_key_value_heads is not one number"):
        ModelConfig("x", config, torch.float32, torch.device("cpu")).layers()


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is checked against the number of GPUs."""
    for found, name, told in (
        (0, "cuda:3", "^device is cuda:3, but torch finds no CUDA device here$"),
        (0, "cuda", "^device is cuda, but"),
        (1, "cuda:1", "^device is cuda:1, but torch finds cuda:0 only$"),
        (2, "cuda:2", "^device is cuda:2, but torch finds cuda:0 to cuda:1$"),
    ):
        monkeypatch.setattr("torch.cuda.is_available", lambda found=found: found > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda found=found: found)
        with pytest.raises(ModelError, match=told):
            torch_device(name)
    assert torch_device("cuda:1") == torch.device("cuda", 1)
    assert torch_device("auto") == torch.device("cuda")


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_snapshot_without_weights_is_planned_by_its_config(tmp_path: Path, name: str) -> None:
    """A broken download leaves an index, and another program a GGUF file in the same folder."""
    config = {**json.loads((EMBEDDED_MODEL / "config.json").read_text()), "model_type": name}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for changes in (config, {**config, "quantization_config": None}):
        (tmp_path / "config.json").write_text(json.dumps(changes))
        outline = read_model_config(tmp_path, device="cpu", has_weights=False)
        assert outline.config.model_type == name
        assert outline.num_parameters() > 0
        assert outline.num_stored_bytes() is None


def test_models_without_rotary_positions_are_known_by_their_config() -> None:
    """The model without memory has no rotary module."""
    for name, class_name in (("bert", "BertLMHeadModel"), ("gptj", "GPTJForCausalLM")):
        config = ModelConfig("x", tiny_config(name), torch.float32, torch.device("cpu"))
        with pytest.raises(ModelError, match=f"^{class_name} has no rotary position embeddings"):
            config.native()
