"""`python -m benchmarks.made_mixture FILE.gguf`: a file of a mixture with random weights.

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

from benchmarks.made_gguf import blocks, finish, has_more_bits

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


def type_of(name: str, layer: int, num_layers: int, types: str) -> Type:
    """Return the type that llama-quantize gives a weight."""
    if types != "Q4_K_M":
        return Type.MXFP4 if types == "MXFP4" and name.endswith("_exps") else Type.Q8_0
    is_chosen = name == "attn_v" or name.startswith("ffn_down")
    return Type.Q6_K if is_chosen and has_more_bits(layer, num_layers) else Type.Q4_K


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
        kind = type_of(name, layer, shape.layers, types)
        rows = blocks(kind, *size, seed=100 * layer + place)
        if name.endswith("_exps"):
            rows = np.stack([np.roll(rows, 7 * each, axis=0) for each in range(shape.experts)])
        writer.add_tensor(f"blk.{layer}.{name}.weight", rows, raw_dtype=kind)
    draw = np.random.default_rng(layer)
    router = 2.0 * draw.standard_normal((shape.experts, hidden), np.float32) / hidden**0.5
    writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    head_dim = shape.head_dim
    for name, dim in (
        ("attn", hidden), ("ffn", hidden), ("attn_q", head_dim), ("attn_k", head_dim),
    ):  # fmt: skip
        writer.add_tensor(f"blk.{layer}.{name}_norm.weight", np.ones(dim, np.float32))


def add_vocabulary(writer: gguf.GGUFWriter, size: int, pre: str = "qwen2") -> None:
    """Add the tokens of a byte-level tokenizer with one merge, and fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + place) for place in range(256 - len(printable))]
    tokens = ["<|begin|>", "<|end|>", *sorted([*map(chr, printable), *others]), "ab"]
    kinds = [3, 3] + [1] * (len(tokens) - 2) + [5] * (size - len(tokens))
    tokens += [f"[PAD{place}]" for place in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)  # noqa: FBT003  # gguf's own interface


def write(path: Path, shape: Shape, types: str) -> None:
    """Write the file; `types`: one of TYPES."""
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.between)
    writer.add_expert_feed_forward_length(shape.between)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.choices)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    add_vocabulary(writer, shape.vocabulary)
    for name, kind in (
        ("token_embd", Type.Q4_K if types == "Q4_K_M" else Type.Q8_0),
        ("output", Type.Q6_K if types == "Q4_K_M" else Type.Q8_0),
    ):
        rows = blocks(kind, shape.vocabulary, shape.hidden, seed=7)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
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


if __name__ == "__main__":
    main()
