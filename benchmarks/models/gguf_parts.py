"""The parts of GGUF files with random weights: blocks, sizes, a vocabulary.

A step takes as long with random weights as with others. Weights have a mean of about zero, so that
activations do not grow with depth.
"""

from typing import Protocol

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_WIDTH = 0.02  # standard deviation of weights, about
# The places of float16 numbers in a block of each type, and what each is in units of the first. The
# minimum of a K-quant is as large as the mean of its numbers.
_SCALES = {
    Type.Q4_K: {0: 1.0, 2: 7.5},
    Type.Q5_K: {0: 1.0, 2: 15.5},
    Type.Q6_K: {208: 1.0},
    Type.Q8_0: {0: 1.0},
}
# The deviation of a block's values if the first of these numbers is one.
_DEVIATIONS = {Type.Q4_K: 258.0, Type.Q5_K: 527.0, Type.Q6_K: 1366.0, Type.Q8_0: 74.0}
_POWER = 120  # the exponent byte of MXFP4 with values of about that width


class Shape(Protocol):
    """The sizes that all made models have."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def blocks(kind: Type, num_rows: int, num_inputs: int, seed: int) -> np.ndarray:
    """Return random rows of a type, [N, bytes]."""
    draw = np.random.default_rng(seed)
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    made = draw.integers(0, 256, (num_rows, num_inputs // num_values, num_bytes), np.uint8)
    if kind == Type.MXFP4:
        made[..., 0] = _POWER
        return made.reshape(num_rows, -1)
    for at, units in _SCALES[kind].items():
        number = np.array([units * _WIDTH / _DEVIATIONS[kind]], np.float16)
        made[..., at : at + 2] = number.view(np.uint8)
    return made.reshape(num_rows, -1)


def q4_k_m(name: str, layer: int, num_layers: int) -> Type:
    """Return the type of a layer's weight by llama-quantize's Q4_K_M."""
    eighth = num_layers // 8
    is_finer = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    is_sensitive = name == "attn_v" or name.startswith("ffn_down")
    return Type.Q6_K if is_sensitive and is_finer else Type.Q4_K


def add_sizes(writer: gguf.GGUFWriter, shape: Shape, context: int, between: int) -> None:
    """Add the sizes that every model has; `between`: the inner width of its MLP."""
    writer.add_context_length(context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(between)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)


# The tokens of add_vocabulary that are letters, digits and marks of ASCII.
_WHOLE = slice(2, 96)


def clear_incomplete(rows: np.ndarray) -> np.ndarray:
    """Return the rows of a head, [N, bytes], with zeros for tokens that are no whole characters.

    One of the other logits is positive, so greedy decoding never chooses a zero. llama.cpp streams
    whole characters only, and so an event for each token needs such a head.
    """
    cleared = np.zeros_like(rows)
    cleared[_WHOLE] = rows[_WHOLE]
    return cleared


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


def add_weight(writer: gguf.GGUFWriter, name: str, rows: np.ndarray, kind: Type) -> None:
    """Add a weight of rows in a type."""
    writer.add_tensor(f"{name}.weight", rows, raw_dtype=kind)


def add_norm(writer: gguf.GGUFWriter, name: str, dim: int) -> None:
    """Add a norm of ones."""
    writer.add_tensor(f"{name}.weight", np.ones(dim, np.float32))


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
