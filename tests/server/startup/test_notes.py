"""Parts of a checkpoint that are not served: every command says so, or refuses the rest by name."""

import json
import shutil
from pathlib import Path

import pytest
from transformers.utils import find_adapter_config_file

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.files.pretrained import NO_ADAPTER
from ropewalk.model_runtime.loading.hub.needed_files import needed_files
from ropewalk.model_runtime.loading.hub.wanted import Wanted
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written
from tests.servers.processes import run_here

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model with an adapter beside its weights."""
    folder = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))
    (folder / ADAPTER[0]).write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    (folder / ADAPTER[1]).write_bytes(b"")  # it is not read
    return folder


def check(model: Path, tmp_path: Path) -> str:
    """Run `config check` on a model; return what it prints."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(f"model: {model}\ndevice: cpu\n")
    ended = run_here("config", "check", str(file))
    return ended.stdout + ended.stderr


def test_an_adapter_beside_weights_is_told_with_the_way_to_merge_it(
    model: Path, tmp_path: Path
) -> None:
    """The weights are served without it, whatever transformers would load with peft."""
    told = f"warning          the adapter of {model / ADAPTER[0]} is not served: merge it into its"
    assert told in check(model, tmp_path)
    assert told in run_here("inspect", str(model), "--device", "cpu").stdout


def test_transformers_does_not_load_the_adapter(model: Path) -> None:
    """It looks for one in every folder if peft is installed."""
    assert find_adapter_config_file(str(model)) is not None
    assert find_adapter_config_file(str(model), **NO_ADAPTER) is None


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors"])
def test_a_folder_with_an_adapter_only_is_refused_by_name(
    absent: str, model: Path, tmp_path: Path
) -> None:
    """Some trainers save the tokenizer and the config beside it."""
    (model / absent).unlink()
    told = f"ropewalk: {model} has an adapter without its model: merge it into its model with peft"
    assert told in check(model, tmp_path)


def test_a_hub_repository_with_an_adapter_only_is_refused_by_name() -> None:
    """It has no config, which was the reason told before."""
    with pytest.raises(ModelError, match="a/b has an adapter without its model: merge it"):
        needed_files("a/b", {*ADAPTER, "tokenizer.json"}, Wanted(weights=True), list)
    whole = {*ADAPTER, "config.json", "tokenizer.json", "part.safetensors"}
    assert ADAPTER[1] not in needed_files("a/b", whole, Wanted(weights=True), list)


def test_an_id_of_a_file_that_names_no_token_is_told(tmp_path: Path) -> None:
    """One line has all of them."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("padding", "seperator")]
    llama = next(case for case in CASES if case.name == "llama")
    path = llama.write(tmp_path / "m.gguf", Written(metadata=dict.fromkeys(keys, 2**32 - 1)))
    told = f"warning          {keys[0]} 4294967295, {keys[1]} 4294967295: the file has no such"
    assert told in check(path, tmp_path)
