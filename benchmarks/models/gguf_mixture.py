"""Write a GGUF file of a mixture with random weights.

The layers have the shape of Qwen3-MoE. A step takes as long with random weights as with others, and
a random router chooses experts evenly, which is the most that several rows can read. The experts of
a layer are the rows of one matrix in other orders, so that a file is written in seconds.
"""

from pathlib import Path
from typing import NamedTuple

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from benchmarks.models.gguf_parts import (
    add_norm,
    add_sizes,
    add_vocabulary,
    add_weight,
    blocks,
    finish,
    q4_k_m,
)

_ARCHITECTURE = "qwen3moe"
_CONTEXT = 4096
TYPES = ("Q4_K_M", "Q8_0", "MXFP4")  # the last has its experts in it, and the rest in Q8_0


class Shape(NamedTuple):
    """The sizes of a mixture."""

    layers: int = 20
    hidden: int = 1024
    between: int = 768  # of an expert
    experts: int = 32
    choices: int = 4
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 8192


def _type_of(name: str, layer: int, num_layers: int, types: str) -> Type:
    """Return the type that llama-quantize gives a weight."""
    if types != "Q4_K_M":
        return Type.MXFP4 if types == "MXFP4" and name.endswith("_exps") else Type.Q8_0
    return q4_k_m(name, layer, num_layers)


def _layer(writer: gguf.GGUFWriter, shape: Shape, layer: int, types: str) -> None:
    """Add the tensors of a layer."""
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    sizes = {
        "attn_q": (width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_output": (hidden, width),
        "ffn_gate_exps": (shape.between, hidden),
        "ffn_up_exps": (shape.between, hidden),
        "ffn_down_exps": (hidden, shape.between),
    }
    for place, (name, size) in enumerate(sizes.items()):
        kind = _type_of(name, layer, shape.layers, types)
        rows = blocks(kind, *size, seed=100 * layer + place)
        if name.endswith("_exps"):
            rows = np.stack([np.roll(rows, 7 * each, axis=0) for each in range(shape.experts)])
        add_weight(writer, f"blk.{layer}.{name}", rows, kind)
    draw = np.random.default_rng(layer)
    router = 2.0 * draw.standard_normal((shape.experts, hidden), np.float32) / hidden**0.5
    writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    head_dim = shape.head_dim
    for name, dim in (
        ("attn", hidden), ("ffn", hidden), ("attn_q", head_dim), ("attn_k", head_dim),
    ):  # fmt: skip
        add_norm(writer, f"blk.{layer}.{name}_norm", dim)


def write(path: Path, shape: Shape, types: str) -> None:
    """Write the file; `types`: one of TYPES."""
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    add_sizes(writer, shape, _CONTEXT, shape.between)
    writer.add_expert_feed_forward_length(shape.between)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.choices)
    writer.add_rope_freq_base(10_000.0)
    add_vocabulary(writer, shape.vocabulary)
    for name, kind in (
        ("token_embd", Type.Q4_K if types == "Q4_K_M" else Type.Q8_0),
        ("output", Type.Q6_K if types == "Q4_K_M" else Type.Q8_0),
    ):
        add_weight(writer, name, blocks(kind, shape.vocabulary, shape.hidden, seed=7), kind)
    add_norm(writer, "output_norm", shape.hidden)
    for layer in range(shape.layers):
        _layer(writer, shape, layer, types)
    finish(writer)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--types", type=click.Choice(TYPES), default="Q4_K_M", show_default=True)
@click.option("--layers", default=20, show_default=True, type=click.IntRange(1))
@click.option("--experts", default=32, show_default=True, type=click.IntRange(2))
@click.option("--choices", default=4, show_default=True, help="Experts of a row.")
@click.option("--between", default=768, show_default=True, help="Dimensions within an expert.")
@click.option("--hidden", default=1024, show_default=True, help="Dimensions of a row.")
@click.option("--heads", default="16,4,64", show_default=True, help="Queries, keys, dimensions.")
@click.option("--vocabulary", default=8192, show_default=True, type=click.IntRange(300))
def main(
    file: Path, *, types: str, layers: int, experts: int, choices: int, between: int, hidden: int,
    heads: str, vocabulary: int,
) -> None:  # fmt: skip
    """Write a mixture with random weights."""
    num_heads, num_kv_heads, head_dim = map(int, heads.split(","))
    shape = Shape(
        layers, hidden, between, experts, choices, num_heads, num_kv_heads, head_dim, vocabulary
    )
    write(file, shape, types)
    click.echo(f"{file}: {file.stat().st_size / 1e9:.2f} GB")
