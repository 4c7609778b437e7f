"""Tensors read from GGUF, against gguf's own dequantisation of the whole tensor."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf import gguf_tensors as tensors
from ropewalk.model_runtime.formats.gguf.ggml import READ_TYPES, block_of
from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.formats.gguf.gguf_tensors import read_tensor, read_values
from ropewalk.model_runtime.formats.gguf.gguf_weights import half_split_rows
from tests.checkpoints.gguf_files import interleaved_rows
from tests.checkpoints.k_quants import q4_k

ROWS, LENGTH = 12, 512


def written(path: Path, stored: np.ndarray, kind: Type) -> Path:
    """A file with the one tensor `w`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_rows(kind: Type) -> np.ndarray:
    """Random finite rows in a type: quantised if gguf can, else random bytes with tame scales."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(ROWS, LENGTH)).astype(np.float32)
    if kind is Type.F32:
        return values
    if kind is Type.F16:
        return values.astype(np.float16)
    if kind is Type.Q4_K:
        return q4_k(values)
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        num_values, num_bytes = block_of(kind.name)
        shape = (ROWS, LENGTH // num_values * num_bytes)
        # No byte's upper bits are 0x7c or 0xfc, so that no float16 in a block is Inf or NaN.
        return generator.integers(0, 0x3C, size=shape).astype(np.uint8)


def test_every_type_that_gguf_dequantises_is_read() -> None:
    """A new version of gguf may bring more types; then the table grows."""
    able = {kind.name for kind in gguf.quants._type_traits}
    assert set(READ_TYPES) == able | {"F32", "F16"}


@pytest.mark.parametrize("name", READ_TYPES)
def test_a_type_is_read_a_piece_at_a_time(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of five rows give what gguf gives for the whole tensor, rounded once."""
    kind = Type[name]
    stored = stored_rows(kind)
    expected = torch.from_numpy(gguf.quants.dequantize(stored, kind).astype(np.float32))
    assert expected.shape == (ROWS, LENGTH)
    assert float(expected.std()) > 0
    info = read_gguf(written(tmp_path / "w.gguf", stored, kind)).tensors["w"]
    monkeypatch.setattr(tensors, "_PIECE_VALUES", 5 * LENGTH)
    assert torch.equal(read_tensor(info, torch.float32), expected)
    assert torch.equal(read_tensor(info, torch.bfloat16), expected.to(torch.bfloat16))
    order = half_split_rows(2, 6)
    reordered = read_tensor(info, torch.float32, row_order=order)
    assert torch.equal(torch.from_numpy(interleaved_rows(reordered.numpy(), 2)), expected)


def test_the_encoder_of_these_tests_is_close_to_its_input() -> None:
    """The Q4_K of the tests is a real one: within a sixteenth of each group's range."""
    values = np.random.default_rng(1).normal(size=(4, 512)).astype(np.float32)
    back = gguf.quants.dequantize(q4_k(values), Type.Q4_K)
    groups = values.reshape(-1, 32)
    spread = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
    error = np.abs(back.reshape(-1, 32) - groups).max(-1)
    assert (error <= 0.08 * spread).all()


def test_an_offset_is_taken_away_in_float32(tmp_path: Path) -> None:
    """Gemma's norms are stored with one added."""
    values = np.array([[1.5, 0.25, 3.0]], np.float32)
    info = read_gguf(written(tmp_path / "w.gguf", values, Type.F32)).tensors["w"]
    assert read_tensor(info, torch.float32, offset=-1.0).tolist() == [[0.5, -0.75, 2.0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused_by_the_tensors_name(tmp_path: Path, bad: float) -> None:
    """A file may be damaged without being shorter."""
    values = np.ones((ROWS, 64), np.float32)
    values[7, 3] = bad
    info = read_gguf(written(tmp_path / "w.gguf", values, Type.F32)).tensors["w"]
    with pytest.raises(ModelError, match=r"w\.gguf: tensor w has NaN or Inf"):
        read_tensor(info, torch.float32)
    with pytest.raises(ModelError, match="tensor w has NaN or Inf"):
        read_values(info)


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    """The sentence says what to choose."""
    values = np.full((1, 32), 1e6, np.float32)
    info = read_gguf(written(tmp_path / "w.gguf", values, Type.F32)).tensors["w"]
    with pytest.raises(ModelError, match="w is too large for float16; use bfloat16"):
        read_tensor(info, torch.float16)
