"""Write a GGUF file of a Llama in Q4_K_M with random weights.

The shapes are those of `llama`; `1b` is TinyLlama's. The types are those that llama-quantize
gives its weights. So llama.cpp and this server are measured with one large file, without a
download. The orders of query and key rows do not matter, because they are random.
"""

from pathlib import Path

import click
import gguf
from gguf import GGMLQuantizationType as Type

from benchmarks.models.gguf_parts import (
    add_norm,
    add_sizes,
    add_vocabulary,
    add_weight,
    blocks,
    clear_incomplete,
    finish,
    q4_k_m,
)
from benchmarks.models.llama import SHAPES, Shape

_CONTEXT = 4096


def _layer(writer: gguf.GGUFWriter, shape: Shape, layer: int) -> None:
    """Add the tensors of a layer."""
    hidden, between = shape.hidden, shape.intermediate
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "attn_q": (width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_output": (hidden, width),
        "ffn_gate": (between, hidden),
        "ffn_up": (between, hidden),
        "ffn_down": (hidden, between),
    }
    for place, (name, size) in enumerate(sizes.items()):
        kind = q4_k_m(name, layer, shape.layers)
        rows = blocks(kind, *size, seed=100 * layer + place)
        add_weight(writer, f"blk.{layer}.{name}", rows, kind)
    for name in ("attn_norm", "ffn_norm"):
        add_norm(writer, f"blk.{layer}.{name}", hidden)


def write(path: Path, shape: Shape) -> None:
    """Write the file."""
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, shape, _CONTEXT, shape.intermediate)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(shape.vocab)
    add_vocabulary(writer, shape.vocab)
    embedding = blocks(Type.Q4_K, shape.vocab, shape.hidden, seed=7)
    add_weight(writer, "token_embd", embedding, Type.Q4_K)
    head = clear_incomplete(blocks(Type.Q6_K, shape.vocab, shape.hidden, seed=7))
    add_weight(writer, "output", head, Type.Q6_K)
    add_norm(writer, "output_norm", shape.hidden)
    for layer in range(shape.layers):
        _layer(writer, shape, layer)
    finish(writer)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--shape", type=click.Choice(["medium", "1b"]), default="1b", show_default=True)
def main(file: Path, shape: str) -> None:
    """Write a Llama with random weights."""
    write(file, SHAPES[shape])
    click.echo(f"{file}: {file.stat().st_size / 1e9:.2f} GB")
