"""Rotation tables that are filled in beside others, and the memory that they are in."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.model_runtime.attention import rope_tables
from ropewalk.model_runtime.attention.rope_tables import TILE, LayerTables, RopeTables
from ropewalk.rope import Linear, Profile, Unscaled, Yarn, native_rope
from ropewalk.rope.angles import offset_angles, page_start_angles

CPU = torch.device("cpu")
NATIVE = native_rope({"max_position_embeddings": 64, "head_dim": 16})
PROFILES = [
    Profile(Unscaled()),
    Profile(Yarn(factor=4.0, original_max_position_embeddings=64), logn_len=64),
    *(Profile(Linear(factor=float(factor))) for factor in range(2, 8)),
]


def pointers(tables: RopeTables) -> list[int]:
    """The addresses of all that kernels read."""
    found = []
    for layer in (tables.layer("all"), tables.layer(None)):
        found += [each.data_ptr() for each in layer.device_tensors]
        found += [each.ctypes.data for each in layer.kernel_arrays]
    return found


def numbers(layer: LayerTables, table_id: int) -> Iterator[np.ndarray]:
    """All numbers of one table."""
    for each in layer.device_tensors:
        yield each[table_id].numpy()
    for array in layer.kernel_arrays:
        yield np.asarray(array[table_id])


def test_tables_within_the_room_move_nothing() -> None:
    """Eight tables, one at a time, and the angles of each are its own to the bit."""
    tables = RopeTables(NATIVE, 16, 256, CPU, room=len(PROFILES))
    assert tables.id_of(PROFILES[0]) == 0
    before = pointers(tables)
    assert [tables.id_of(each) for each in PROFILES] == list(range(len(PROFILES)))
    assert pointers(tables) == before
    assert (tables.num_tables, tables.generation) == (len(PROFILES), 0)
    layer = tables.layer("all")
    for table_id, profile in enumerate(PROFILES):
        table = profile.scaling.frequencies(NATIVE.rotary)
        starts = page_start_angles(table.inv_freq_P, 16, 16)
        offsets = offset_angles(table.inv_freq_P, 16)
        tensors, arrays = layer.device_tensors, layer.kernel_arrays
        assert torch.equal(tensors.start_cos_SNP[table_id], starts.cos)
        assert torch.equal(tensors.start_sin_SNP[table_id], starts.sin)
        assert torch.equal(tensors.offset_cos_SOP[table_id], offsets.cos)
        assert torch.equal(tensors.offset_sin_SOP[table_id], offsets.sin)
        assert np.array_equal(arrays.start_cos_SNP[table_id], starts.cos.numpy())
        assert np.array_equal(arrays.offset_cos_SPO[table_id], offsets.cos.T.numpy())
        assert np.array_equal(arrays.offset_sin_SPO[table_id], offsets.sin.T.numpy())
        tile = layer.at(table_id, torch.arange(TILE))
        assert torch.equal(tensors.tile_cos_SQP[table_id], tile.cos[:, 0])
        assert torch.equal(tensors.tile_sin_SQP[table_id], tile.sin[:, 0])
        factor = table.attention_factor
        assert layer.attention_factor[table_id] == factor
        assert arrays.attention_factor_S[table_id] == np.float32(factor)
        assert tensors.squared_factor_S[table_id] == torch.tensor(factor * factor)
        logn = np.log(profile.logn_len) if profile.logn_len else 0.0
        assert layer.logn_len[table_id] == profile.logn_len
        assert arrays.logn_S[table_id] == logn
        assert tensors.logn_S[table_id] == torch.tensor(logn, dtype=torch.float32)


def test_more_tables_than_room_move_and_keep_their_numbers() -> None:
    """The room doubles, and the generation counts how often."""
    small = RopeTables(NATIVE, 16, 256, CPU)
    large = RopeTables(NATIVE, 16, 256, CPU, room=len(PROFILES))
    for profile in PROFILES:
        assert small.id_of(profile) == large.id_of(profile)
        assert small.layer("all").kernel_arrays is small.layer("all").kernel_arrays
    assert (small.generation, large.generation) == (3, 0)
    for table_id in range(len(PROFILES)):
        ours, theirs = (numbers(each.layer("all"), table_id) for each in (small, large))
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("part", "num_before", "room"),
    [
        ("page_start_angles", 0, 4),
        ("offset_angles", 1, 4),
        ("offset_angles", 1, 2),
        ("LayerTables", 0, 1),
        ("LayerTables", 1, 2),
    ],
)
def test_a_table_without_memory_is_built_at_the_next_request(
    monkeypatch: pytest.MonkeyPatch, part: str, num_before: int, room: int
) -> None:
    """The fault comes once, also while all tables move; no table is left half filled."""
    tables = RopeTables(NATIVE, 16, 256, CPU, room=room)
    whole = RopeTables(NATIVE, 16, 256, CPU, room=len(PROFILES))
    for profile in PROFILES[:2]:
        assert tables.id_of(profile) == whole.id_of(profile)
    real, calls_left = getattr(rope_tables, part), num_before

    def fails_once(*arguments: Any) -> Any:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == -1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    generation = tables.generation
    monkeypatch.setattr(rope_tables, part, fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        tables.id_of(PROFILES[2])
    assert (tables.num_tables, tables.generation) == (2, generation)
    for profile in PROFILES:
        assert tables.id_of(profile) == whole.id_of(profile)
    for table_id in range(len(PROFILES)):
        ours, theirs = (numbers(each.layer("all"), table_id) for each in (tables, whole))
        assert all(np.array_equal(*pair) for pair in zip(ours, theirs, strict=True))
