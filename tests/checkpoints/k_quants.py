"""A small encoder of Q4_K for tests; gguf can read K types and cannot write them.

A block holds 256 values in 8 groups of 32. Each group has a scale and a minimum of 6 bits, and two
float16 numbers scale these. The layout is that of ggml's `block_q4_K`.
"""

import numpy as np

_VALUES, _GROUPS = 256, 8


def q4_k(rows: np.ndarray) -> np.ndarray:
    """Encode rows whose length is a multiple of 256 as bytes."""
    groups = rows.reshape(-1, _GROUPS, 32).astype(np.float32)
    lowest = np.minimum(groups.min(-1), 0)
    step = (groups.max(-1) - lowest) / 15
    d = np.float16(step.max(-1, keepdims=True) / 63)
    dmin = np.float16(-lowest.min(-1, keepdims=True) / 63)
    scales, minima = (_six_bits(step, d), _six_bits(-lowest, dmin))
    own_step = (d.astype(np.float32) * scales)[..., None]
    own_minimum = (dmin.astype(np.float32) * minima)[..., None]
    safe = np.where(own_step == 0, 1, own_step)
    nibbles = np.clip(np.rint((groups + own_minimum) / safe), 0, 15).astype(np.uint8)
    pairs = nibbles.reshape(-1, 4, 2, 32)  # two groups share the bytes of one
    packed = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    parts = [d.view(np.uint8), dmin.view(np.uint8), _packed(scales, minima)]
    blocks = np.concatenate([*parts, packed.reshape(-1, 128)], axis=-1)
    return blocks.reshape(rows.shape[0], -1)


def _six_bits(values: np.ndarray, unit: np.ndarray) -> np.ndarray:
    safe = np.where(unit == 0, 1, unit).astype(np.float32)
    return np.clip(np.rint(values / safe), 0, 63).astype(np.uint8)


def _packed(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    first = (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6)
    second = (minima[:, :4] & 63) | ((minima[:, 4:] >> 4) << 6)
    third = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], axis=-1).astype(np.uint8)
