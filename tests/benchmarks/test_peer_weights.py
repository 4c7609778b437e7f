"""Folders for peers: their weights are those that the engine reads."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.peer_weights import main
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written

pytestmark = pytest.mark.costly(by="file")


def test_eight_bits_are_read_as_the_stored_weights_but_for_the_rounding(tmp_path: Path) -> None:
    """A weight moves by half of its output's scale at most."""
    arguments = ["w8a8", str(EMBEDDED_MODEL), str(tmp_path / "eight")]
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    written = load_file(tmp_path / "eight" / "model.safetensors")
    names = [name.removesuffix("_scale") for name in written if name.endswith("_scale")]
    assert len(names) > 7
    stored = load_file(EMBEDDED_MODEL / "model.safetensors")
    for name in names:
        assert written[name].dtype == torch.int8
        scale_N1 = written[f"{name}_scale"]
        distance_NK = (written[name] * scale_N1 - stored[name].float()).abs()
        assert (distance_NK <= 0.501 * scale_N1).all()


def test_a_file_becomes_a_folder_with_its_weights_and_tokenizer(tmp_path: Path) -> None:
    """The folder's logits are those of the file, read by transformers."""
    case = next(case for case in CASES if case.name == "llama")
    path = case.write(tmp_path / "m.gguf", Written())
    arguments = ["floats", str(path), str(tmp_path / "folder")]
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    ids = torch.tensor([[5, 9, 77, 3]])
    with torch.inference_mode():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")(ids).logits
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")(ids).logits
    assert torch.equal(found, expected)
    assert (tmp_path / "folder" / "tokenizer.json").is_file()
