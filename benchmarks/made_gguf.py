"""Blocks of GGUF types with random weights.

A step takes as long with random weights as with others. Weights have a mean of about zero, so that
activations do not grow with depth.
"""

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


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Return whether llama-quantize's Q4_K_M gives a layer's sensitive weights more bits."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
