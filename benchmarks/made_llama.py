"""`python -m benchmarks.made_llama FILE.gguf`: a Llama in Q4_K_M with random weights.

The shapes are those of `make_model`; `1b` is TinyLlama's. The types are those that llama-quantize
gives its weights. So llama.cpp and this server can be measured with one file of a size that nobody
has to download. The orders of query and key rows do not matter, because they are random.
"""

from pathlib import Path

import click
import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from benchmarks.made_gguf import blocks, finish
from benchmarks.made_mixture import add_vocabulary, type_of
from benchmarks.make_model import SHAPES, Shape

_CONTEXT = 4096
_TYPES = "Q4_K_M"


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
        kind = type_of(name, layer, shape.layers, _TYPES)
        rows = blocks(kind, *size, seed=100 * layer + place)
        writer.add_tensor(f"blk.{layer}.{name}.weight", rows, raw_dtype=kind)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, np.float32))


def write(path: Path, shape: Shape) -> None:
    """Write the file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(shape.vocab)
    add_vocabulary(writer, shape.vocab)
    for name, kind in (("token_embd", Type.Q4_K), ("output", Type.Q6_K)):
        rows = blocks(kind, shape.vocab, shape.hidden, seed=7)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
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


if __name__ == "__main__":
    main()
