"""Build Hugging Face's rope block from a file's `rope.*` keys and factor tensors.

Sources: gguf's docs/gguf.md for the keys, llama.cpp's converters for what they write, and its pull
request 8676 for `rope_freqs.weight`. transformers' own GGUF loader reads `rope.freq_base` only.

Shapes: P = rotated pairs.
"""

import math
from typing import Any

import numpy as np

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_file import GgufFile
from ropewalk.model_runtime.formats.gguf.gguf_tensors import read_values

# Keys that change no answer: notes of converters, and what other programs plan with.
_WITHOUT_EFFECT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})


class Fields:
    """The keys `{architecture}.*` of a file. Every method raises ModelError with one sentence."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."
        self._read = {self._prefix + key for key in _WITHOUT_EFFECT}

    def has(self, key: str) -> bool:
        return self._prefix + key in self.file.metadata

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def value(self, key: str) -> Any:
        """Return a value of any type; None if the file lacks it."""
        return self.file.metadata.get(self._noted(key))

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        return self.file.integer(self._noted(key), default, minimum=minimum)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        return self.file.number(self._noted(key), default)

    def boolean(self, key: str, *, default: bool) -> bool:
        return self.file.boolean(self._noted(key), default=default)

    def refuse(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.file.path}: {self._prefix}{key} {problem}")

    def check_all_read(self) -> None:
        """Raise ModelError that names a key which nothing has read."""
        own = {key for key in self.file.metadata if key.startswith(self._prefix)}
        unread = sorted(own - self._read)
        if unread:
            value = str(self.file.metadata[unread[0]])[:60]
            raise ModelError(
                f"{self.file.path}: {unread[0]} is {value}, which is not read for architecture "
                f"{self.file.architecture}, so the answers would differ from the model's"
            )

    def _noted(self, key: str) -> str:
        self._read.add(self._prefix + key)
        return self._prefix + key


_THETA = 10_000.0  # llama.cpp's default
_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({_FREQS, _LONG, _SHORT})
# Published settings of Llama 3.1's method: L, low_freq_factor, high_freq_factor.
_LLAMA3_SETTINGS = [
    (length, 1.0, high) for high in (4.0, 2.0, 8.0) for length in (8192, 4096, 16384, 32768)
]
# The converter computes in float32, and the last bits of a power differ between processors. Near
# the longest wavelength a divisor of 32 magnifies them to 1e-5. The settings are further apart.
_SAME = 2e-5


def rope_block(fields: Fields, head_dim: int, max_len: int) -> dict[str, Any]:
    """Return `rope_parameters` for a head of `head_dim`. Raises ModelError for what is unknown."""
    theta = fields.number("rope.freq_base", _THETA)
    if theta <= 0:
        raise fields.refuse("rope.freq_base", f"must be > 0, got {theta:g}")
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    block: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if rotary_dim > head_dim or rotary_dim % 2:
        raise fields.refuse(
            "rope.dimension_count", f"must be even and <= {head_dim}, got {rotary_dim}"
        )
    if rotary_dim < head_dim:
        block["partial_rotary_factor"] = rotary_dim / head_dim
    block |= _scaling(fields, max_len)
    if fields.has_tensor(_FREQS):
        block |= _from_divisors(fields, rotary_dim, theta, block["rope_type"])
    if fields.has_tensor(_LONG) or fields.has_tensor(_SHORT):
        block |= _longrope(fields, rotary_dim // 2, max_len, block["rope_type"])
    elif block["rope_type"] == "longrope":
        raise fields.refuse("rope.scaling.type", f"is longrope, and the file lacks {_LONG}")
    return block


def _scaling(fields: Fields, max_len: int) -> dict[str, Any]:
    """Return the block of `rope.scaling.*`; longrope's lists and length are added by others."""
    kind = fields.value("rope.scaling.type") or "linear"  # as in llama.cpp
    if kind == "longrope":
        return {"rope_type": "longrope"}
    if kind not in ("none", "linear", "yarn"):
        raise fields.refuse(
            "rope.scaling.type", f"must be none, linear, yarn or longrope, got {kind!r}"
        )
    # Older files have the second name. llama.cpp takes 0 for 1, too.
    key = "rope.scaling.factor"
    key = key if fields.has(key) else "rope.scale_linear"
    factor = fields.number(key, 1.0) or 1.0
    if kind == "none":
        return {}
    if factor < 1:
        raise fields.refuse(key, f"must be >= 1, got {factor:g}")
    if kind == "linear":
        return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    if fields.number("rope.scaling.attn_factor", 1.0) != 1:
        raise fields.refuse("rope.scaling.attn_factor", "is not read for yarn")
    return _yarn(fields, factor, max_len)


def _yarn(fields: Fields, factor: float, max_len: int) -> dict[str, Any]:
    extrapolated = fields.number("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolated not in (1, -1):  # llama.cpp: a negative one means the default
        raise fields.refuse("rope.scaling.yarn_ext_factor", f"must be 1, got {extrapolated:g}")
    if fields.number("rope.scaling.yarn_log_multiplier", 0.0) != 0:
        raise fields.refuse("rope.scaling.yarn_log_multiplier", "is not read")
    block = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", max_len
        ),
    }
    if fields.boolean("rope.scaling.finetuned", default=False):
        block["finetuned"] = True
    # Converters write the config's fields under these names.
    for key, name in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if fields.has(f"rope.scaling.{key}"):
            block[name] = fields.number(f"rope.scaling.{key}")
    return block


def _from_divisors(fields: Fields, rotary_dim: int, theta: float, kind: str) -> dict[str, Any]:
    """Return the llama3 block that gives the divisors of `rope_freqs.weight`; none if all are 1."""
    divisors_P = _divisors(fields, _FREQS, rotary_dim // 2)
    if bool((divisors_P == 1).all()):
        return {}
    if kind != "default":
        raise fields.refuse("rope.scaling.type", f"is {kind}, and the file has {_FREQS} beside it")
    factor = float(str(np.float32(divisors_P.max())))
    for setting in _LLAMA3_SETTINGS:
        expected_P = llama3_divisors_P(rotary_dim, theta, factor, setting)
        if np.allclose(divisors_P, expected_P, rtol=_SAME, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": setting[0],
                "low_freq_factor": setting[1],
                "high_freq_factor": setting[2],
            }
    raise fields.refuse(
        "rope.freq_base",
        f"is {theta:g}, and no published setting of llama3 gives the divisors of {_FREQS} (the "
        f"largest is {factor:g})",
    )


def llama3_divisors_P(
    rotary_dim: int, theta: float, factor: float, setting: tuple[int, float, float]
) -> "np.ndarray[Any, Any]":
    """Return by what Llama 3.1's method divides each frequency, in float64 [P].

    `setting` is L, low_freq_factor and high_freq_factor.
    """
    length, low, high = setting
    wavelength_P = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth_P = np.clip((length / wavelength_P - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth_P) / factor + smooth_P)


def _longrope(fields: Fields, num_pairs: int, max_len: int, kind: str) -> dict[str, Any]:
    """Return Phi-3's block of two lists."""
    if kind not in ("default", "longrope"):
        raise fields.refuse("rope.scaling.type", f"is {kind}, and the file has {_LONG} beside it")
    original = fields.integer("rope.scaling.original_context_length", max_len)
    block: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _decimals(_divisors(fields, _SHORT, num_pairs)),
        "long_factor": _decimals(_divisors(fields, _LONG, num_pairs)),
        "original_max_position_embeddings": original,
    }
    if max_len > original:
        block["factor"] = max_len / original
    own = math.sqrt(1 + math.log(max_len / original) / math.log(original))
    stated = fields.number("rope.scaling.attn_factor", own)
    # The file's number is the formula's, rounded to float32. The formula gives all its bits.
    if np.float32(stated) != np.float32(own):
        block["attention_factor"] = stated
    return block


def _divisors(fields: Fields, name: str, num_pairs: int) -> "np.ndarray[Any, Any]":
    info = fields.file.tensors.get(name)
    if info is None:
        raise fields.refuse("rope.scaling.type", f"needs tensor {name}, which the file lacks")
    values = read_values(info)
    if values.shape != (num_pairs,) or not bool((values > 0).all()):
        raise fields.refuse(
            "rope.dimension_count",
            f"needs {num_pairs} positive numbers in {name}, it has {values.shape[-1]}",
        )
    return values


def _decimals(values: "np.ndarray[Any, Any]") -> list[float]:
    return [float(str(each)) for each in values.astype(np.float32)]
