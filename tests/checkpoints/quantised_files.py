"""Tiny models written as quantised checkpoints, with the weights that a reference reads in them.

References: transformers for FP8 and MXFP4, the package compressed-tensors for its own formats and
AWQ, and the integers that were stored for GPTQ.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.tokens import byte_tokenizer_fast

Tensors = dict[str, torch.Tensor]
# Returns the tensors of a module's weight [O, I], and a function from a number type to the weight.
Encode = Callable[[torch.Tensor], tuple[Tensors, Callable[[torch.dtype], torch.Tensor]]]

SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
_FP8 = torch.float8_e4m3fn


def fp8(block: tuple[int, int] | None, scale_dtype: torch.dtype, names: tuple[str, ...]) -> Encode:
    """FP8 with a scale per block or tensor; `names` are the scale's and the activations'."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, Any]:
        rows, columns = block or weight.shape
        grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        scales = torch.empty(grid)
        wide = torch.empty_like(weight)
        for i in range(grid[0]):
            for j in range(grid[1]):
                at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale = weight[at].abs().max() / 448
                if scale_dtype == torch.float8_e8m0fnu:
                    scale = scale.log2().ceil().exp2()
                scales[i, j] = scale
                wide[at] = scale.to(scale_dtype).float()
        stored = (weight / wide).to(_FP8)
        scale = scales.to(scale_dtype)
        scale = scale if block else scale.reshape(())
        tensors = {"weight": stored, names[0]: scale}
        tensors |= {name: torch.tensor(0.02) for name in names[1:]}
        reference = Fp8Dequantize(None)
        cells = scale if block else scale.reshape(1, 1)
        return tensors, lambda dtype: reference._dequantize_one(stored, cells, dtype)

    return encode


def compressed(kind: str, **weights: Any) -> Encode:
    """A format of compressed-tensors, by its own compressor; scales are stored in bfloat16."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.load_from_registry(kind)
    group = weights.get("group_size")
    block = weights.get("block_structure")

    def encode(weight: torch.Tensor) -> tuple[Tensors, Any]:
        rows, columns = weight.shape
        low, high = -(2 ** (weights["num_bits"] - 1)), 2 ** (weights["num_bits"] - 1) - 1
        if weights["type"] == "float":
            low, high = -448, 448
        if block:
            row_blocks, column_blocks = rows // block[0], columns // block[1]
            cells = weight.reshape(row_blocks, block[0], column_blocks, block[1]).transpose(1, 2)
            cells = cells.flatten(2)
        elif weights["strategy"] == "tensor":
            cells = weight.reshape(1, 1, -1)
        else:
            cells = weight.reshape(rows, -1, group or columns)
        tensors: Tensors = {"weight": weight}
        if weights.get("symmetric", True):
            scale = (cells.abs().amax(-1) / high).to(torch.bfloat16)
        else:
            least, most = cells.amin(-1).clamp(max=0), cells.amax(-1).clamp(min=0)
            scale = ((most - least) / (high - low)).to(torch.bfloat16)
            zero = (low - least / scale.float()).round().clamp(low, high)
            tensors["weight_zero_point"] = zero.to(torch.int8)
        tensors["weight_scale"] = scale.reshape(1) if weights["strategy"] == "tensor" else scale
        stored = compressor.compress(tensors, scheme)

        def reference(dtype: torch.dtype) -> torch.Tensor:
            again = {**stored, "weight_scale": stored["weight_scale"].to(dtype)}
            found: torch.Tensor = compressor.decompress(again, scheme)["weight"]
            return found

        return stored, reference

    return encode


def packed_words(
    values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Pack the last dimension into words of 32 bits, a value at a time."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    lanes = values.long().unflatten(-1, (-1, per_word))
    words = torch.zeros(lanes.shape[:-1], dtype=torch.int64)
    for position, lane in enumerate(order):
        words |= lanes[..., lane] << (position * bits)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _integers(
    weight: torch.Tensor, bits: int, group_of: torch.Tensor, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return integers [O, I], zero points [O, G] and float16 scales [O, G]."""
    most = 2**bits - 1
    num_groups = int(group_of.max()) + 1
    scale = torch.empty(weight.shape[0], num_groups, dtype=torch.float16)
    zero = torch.full(scale.shape, 2 ** (bits - 1))
    for group in range(num_groups):
        values = weight[:, group_of == group]
        low, high = values.amin(1).clamp(max=-1e-3), values.amax(1).clamp(min=1e-3)
        if symmetric:
            scale[:, group] = (2 * torch.maximum(-low, high) / most).half()
        else:
            scale[:, group] = ((high - low) / most).half()
            zero[:, group] = (-low / scale[:, group].float()).round().clamp(1, most).long()
    ratio = weight / scale[:, group_of].float()
    return (ratio.round() + zero[:, group_of]).clamp(0, most).long(), zero, scale


def gptq(bits: int, group_size: int, *, symmetric: bool, shuffled: bool, version: int) -> Encode:
    """GPTQ; version 1 stores zero points minus one. `shuffled` is what `desc_act` does."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, Any]:
        columns = weight.shape[1]
        group_of = torch.arange(columns) // (columns if group_size == -1 else group_size)
        if shuffled:
            group_of = group_of[torch.randperm(columns)]
        values, zero, scale = _integers(weight, bits, group_of, symmetric=symmetric)
        tensors = {
            "qweight": packed_words(values, bits).T.contiguous(),
            "qzeros": packed_words((zero - int(version == 1)).T, bits),
            "scales": scale.T.contiguous(),
            "g_idx": group_of.to(torch.int32),
        }
        exact = (values - zero[:, group_of]).double() * scale[:, group_of].double()
        return tensors, exact.to

    return encode


def awq(group_size: int) -> Encode:
    """AWQ in the order of its `gemm` version, read by compressed-tensors' own converter."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, Any]:
        group_of = torch.arange(weight.shape[1]) // group_size
        values, zero, scale = _integers(weight, 4, group_of, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": packed_words(values.T, 4, order),
            "qzeros": packed_words(zero.T, 4, order),
            "scales": scale.T.contiguous(),
        }
        converter = AutoAWQConverter(group_size=group_size)
        ours = converter.process({f"m.{name}": each.clone() for name, each in tensors.items()})
        weights = {"num_bits": 4, "symmetric": False, "group_size": group_size, "type": "int"}
        scheme = QuantizationScheme(targets=["Linear"], weights={**weights, "strategy": "group"})
        state = {name.removeprefix("m."): each for name, each in ours.items()}
        state["weight_scale"] = state["weight_scale"].float()
        reader = BaseCompressor.load_from_registry("pack-quantized")
        return tensors, reader.decompress(state, scheme)["weight"].to

    return encode


@dataclass(frozen=True)
class Case:
    """A checkpoint's `quantization_config`, and how its modules are encoded."""

    name: str
    config: Mapping[str, Any]
    encode: Encode | Mapping[str, Encode]  # by the end of a module's name
    described: str
    model_type: str = "llama"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def encoder(self, module: str) -> Encode | None:
        """Return the encoder of a module; None if it stays as it is."""
        if not module.endswith("_proj"):
            return None
        if not isinstance(self.encode, Mapping):
            return self.encode
        return next((each for end, each in self.encode.items() if module.endswith(end)), None)

    def write(self, folder: Path, model: PreTrainedModel | None = None) -> "Written":
        """Write a random model, or the given one; unquantised tensors are stored in bfloat16."""
        model = model or tiny_model(self.model_type, **{**SIZES, **self.overrides})
        model.save_pretrained(folder)
        byte_tokenizer_fast().save_pretrained(folder)
        tensors, references = {}, {}
        for name, tensor in files_tensors(folder).items():
            module, _, last = name.rpartition(".")
            encode = self.encoder(module) if last == "weight" else None
            if encode is None:
                tensors[name] = tensor.to(torch.bfloat16)
                references[name] = tensors[name].to
                continue
            stored, references[name] = encode(tensor)
            tensors |= {f"{module}.{part}": each for part, each in stored.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        change_config(folder, quantization_config=dict(self.config))
        return Written(folder, tensors, references)


@dataclass(frozen=True)
class Written:
    """A checkpoint in a folder."""

    folder: Path
    tensors: Tensors
    references: Mapping[str, Callable[[torch.dtype], torch.Tensor]]  # by the weight's name

    def store(self, **changes: torch.Tensor | None) -> None:
        """Write the file again with some tensors replaced, added, or removed (None)."""
        tensors = {**self.tensors, **changes}
        kept = {name: each for name, each in tensors.items() if each is not None}
        save_file(kept, self.folder / "model.safetensors", {"format": "pt"})

    def dequantised(self, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        """Return transformers' model of the references, by way of an unquantised checkpoint."""
        self.write_plain(folder, dtype)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def write_plain(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the references as an unquantised checkpoint."""
        folder.mkdir()
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            (folder / name).write_bytes((self.folder / name).read_bytes())
        change_config(folder, quantization_config=None)
        tensors = {name: each(dtype).contiguous() for name, each in self.references.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def files_tensors(folder: Path) -> Tensors:
    """Return all tensors of a folder with one file of weights."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of a config.json; None removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: each for name, each in values.items() if each is not None}))
