"""Write a GGUF file of Qwen 3.5's shape with random weights.

Three layers of four keep a state, and the fourth attends. By default the sizes are those of Qwen
3.5 0.8B with its whole vocabulary. Types are those that llama-quantize gives each weight.
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

_ARCHITECTURE = "qwen35"
_CONTEXT, _INTERVAL, _TAPS = 262_144, 4, 4
_BASE, _SECTIONS = 10_000_000.0, [11, 11, 10, 0]


class Shape(NamedTuple):
    """The sizes of a hybrid."""

    layers: int = 24
    hidden: int = 1024
    between: int = 3584
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 256
    rotary_dim: int = 64
    states: int = 16  # heads of a layer with states
    state_dim: int = 128
    vocabulary: int = 248_320


def _keeps_state(layer: int) -> bool:
    return (layer + 1) % _INTERVAL != 0


def _sizes(shape: Shape, layer: int) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of a layer's weights."""
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    kv_width, inner = shape.kv_heads * shape.head_dim, shape.states * shape.state_dim
    mlp = {
        "ffn_gate": (shape.between, hidden),
        "ffn_up": (shape.between, hidden),
        "ffn_down": (hidden, shape.between),
    }
    if not _keeps_state(layer):
        return {
            "attn_q": (2 * width, hidden),
            "attn_k": (kv_width, hidden),
            "attn_v": (kv_width, hidden),
            "attn_output": (hidden, width),
        } | mlp
    return {
        "attn_qkv": (3 * inner, hidden),
        "attn_gate": (inner, hidden),
        "ssm_beta": (shape.states, hidden),
        "ssm_alpha": (shape.states, hidden),
        "ssm_out": (hidden, inner),
    } | mlp


def _type_of(name: str, layer: int, num_layers: int, types: str) -> Type:
    """Return the type that llama-quantize gives a weight."""
    if types == "Q8_0":
        return Type.Q8_0
    if name == "attn_qkv":
        return Type.Q5_K
    # llama-quantize counts the layers that have this weight, beside all layers of the model.
    place = layer // _INTERVAL if name == "attn_v" else layer
    return q4_k_m(name, place, num_layers)


def _layer(writer: gguf.GGUFWriter, shape: Shape, layer: int, types: str) -> None:
    """Add the tensors of a layer."""
    hidden, heads = shape.hidden, shape.states
    for place, (name, size) in enumerate(_sizes(shape, layer).items()):
        kind = _type_of(name, layer, shape.layers, types)
        rows = blocks(kind, *size, seed=100 * layer + place)
        add_weight(writer, f"blk.{layer}.{name}", rows, kind)
    norms = {"attn_norm": hidden, "post_attention_norm": hidden}
    if _keeps_state(layer):
        norms["ssm_norm"] = shape.state_dim
        draw = np.random.default_rng(layer)
        taps = draw.standard_normal((3 * heads * shape.state_dim, _TAPS), np.float32) / 2
        writer.add_tensor(f"blk.{layer}.ssm_conv1d.weight", taps)
        writer.add_tensor(f"blk.{layer}.ssm_dt.bias", np.full(heads, -3.0, np.float32))
        rates = -np.linspace(1.0, 16.0, heads, dtype=np.float32)  # of the decays
        writer.add_tensor(f"blk.{layer}.ssm_a", rates)
    else:
        norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    for name, dim in norms.items():
        add_norm(writer, f"blk.{layer}.{name}", dim)


def write(path: Path, shape: Shape, types: str) -> None:
    """Write the file; `types`: Q4_K_M or Q8_0."""
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    add_sizes(writer, shape, _CONTEXT, shape.between)
    writer.add_rope_freq_base(_BASE)
    writer.add_rope_dimension_count(shape.rotary_dim)
    writer.add_rope_dimension_sections(_SECTIONS)
    writer.add_ssm_conv_kernel(_TAPS)
    writer.add_ssm_state_size(shape.state_dim)
    writer.add_ssm_group_count(shape.states)
    writer.add_ssm_time_step_rank(shape.states)
    writer.add_ssm_inner_size(shape.states * shape.state_dim)
    writer.add_uint32(f"{_ARCHITECTURE}.full_attention_interval", _INTERVAL)
    add_vocabulary(writer, shape.vocabulary, "qwen35")
    kind = Type.Q8_0 if types == "Q8_0" else Type.Q6_K
    rows = blocks(kind, shape.vocabulary, shape.hidden, seed=7)
    add_weight(writer, "token_embd", rows, kind)  # the head is tied to it
    add_norm(writer, "output_norm", shape.hidden)
    for layer in range(shape.layers):
        _layer(writer, shape, layer, types)
    finish(writer)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--types", type=click.Choice(["Q4_K_M", "Q8_0"]), default="Q4_K_M", show_default=True)
@click.option("--layers", default=24, show_default=True, type=click.IntRange(4))
@click.option("--vocabulary", default=248_320, show_default=True, type=click.IntRange(300))
def main(file: Path, *, types: str, layers: int, vocabulary: int) -> None:
    """Write a model with states and random weights."""
    write(file, Shape(layers=layers, vocabulary=vocabulary), types)
    click.echo(f"{file}: {file.stat().st_size / 1e9:.2f} GB")
