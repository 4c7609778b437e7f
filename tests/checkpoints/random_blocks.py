"""Random blocks of the types of GGUF that are kept in their bits; `gguf` can write few of them."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# The places of float16 numbers in a block.
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "TQ2_0": (64,),  # is not kept
}


def random_rows(type_name: str, num_rows: int, num_inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of any bits, with scales of both signs, small ones too."""
    rng = np.random.default_rng(seed)
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[Type[type_name]]
    blocks = rng.integers(0, 256, (num_rows, num_inputs // num_values, num_bytes), dtype=np.uint8)
    for at in HALVES[type_name]:
        scales = rng.normal(0, 1, blocks.shape[:2]) * 10.0 ** rng.integers(-7, -1, blocks.shape[:2])
        blocks[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[..., 0] = rng.integers(110, 125, blocks.shape[:2])
    return blocks.reshape(num_rows, -1)


def like(values: np.ndarray, type_name: str, seed: int = 0) -> np.ndarray:
    """Random rows with the shape and the deviation of `values`: the weights of a model."""
    kind, (num_rows, num_inputs) = Type[type_name], values.shape
    rows = random_rows(type_name, num_rows, num_inputs, seed)
    blocks = rows.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    for at in HALVES[type_name]:
        blocks[:, at : at + 2] = np.full((1, 1), 2.0**-12, np.float16).view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = 128 - 12
    ratio = np.log2(values.std() / gguf.quants.dequantize(rows, kind).std()).round()
    for at in HALVES[type_name]:
        blocks[:, at : at + 2] = np.full((1, 1), 2.0 ** (ratio - 12), np.float16).view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = 128 - 12 + ratio
    return rows
