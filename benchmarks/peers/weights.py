"""`python -m benchmarks.peers.weights`: the weights of a model in a folder that a peer reads.

    python -m benchmarks.peers.weights floats FILE.gguf FOLDER
    python -m benchmarks.peers.weights w8a8 MODEL FOLDER

`floats` writes a GGUF file's weights in float32, with the tokenizer that Ropewalk reads from it.
`w8a8` rounds linears to eight bits with a scale for each output, in the format of
compressed-tensors, for products whose activations are rounded to eight bits as well.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.formats.gguf.gguf_tokenizer import read_tokenizer

_WEIGHTS = "model.safetensors"
_MOST = 127
_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
_QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True},
        }
    },
}


def rounded(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 weights and the scale of each output, [N, 1]."""
    weight_NK = weight_NK.float()
    scale_N1 = weight_NK.abs().amax(1, keepdim=True).clamp_min(1e-8) / _MOST
    q_NK = (weight_NK / scale_N1).round().clamp(-_MOST, _MOST).to(torch.int8)
    return q_NK, scale_N1


@click.group()
def main() -> None:
    """Write a model's weights for a peer."""


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def floats(file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file in float32."""
    source, name = str(file.parent), file.name
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name)
    is_tied = model.config.tie_word_embeddings
    weights = {
        key: each.float().contiguous()
        for key, each in model.state_dict().items()
        if not (is_tied and key == "lm_head.weight")
    }
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"dtype": "float32", "architectures": [type(model).__name__]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    # transformers does not read how the file splits digits.
    read_tokenizer(read_gguf(file)).backend.save(str(folder / "tokenizer.json"))


@main.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def w8a8(model: Path, folder: Path) -> None:
    """Write the weights of a folder in eight bits."""
    shutil.copytree(
        model, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    weights: dict[str, Tensor] = {}
    for name, each in load_file(model / _WEIGHTS).items():
        is_linear = each.ndim == 2 and "embed" not in name and not name.startswith("lm_head")
        if is_linear:
            weights[name], weights[f"{name}_scale"] = rounded(each)
        else:
            weights[name] = each
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = _QUANTISATION
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
