"""Dual Chunk Attention in a checkpoint's config."""

from typing import Any

import pytest

from ropewalk.rope import RopeConfigError, native_rope

CONFIG = {"max_position_embeddings": 4096, "hidden_size": 64, "num_attention_heads": 4}
QWEN_1M = {
    "chunk_size": 262_144,
    "local_size": 8192,
    "original_max_position_embeddings": 262_144,
}


def test_dual_chunk_attention_is_read_with_its_trained_length() -> None:
    """Qwen2.5-7B-Instruct-1M declares 1,010,000 tokens, and 262,144 of them were trained."""
    config = {**CONFIG, "max_position_embeddings": 1_010_000}
    native = native_rope({**config, "dual_chunk_attention_config": QWEN_1M})
    assert native.native_len == native.method.native_len == 262_144
    assert native.chunked is not None
    assert (native.chunked.chunk_size, native.chunked.longest) == (262_144, 1_010_000)
    assert native_rope({**config, "dual_chunk_attention_config": None}).native_len == 1_010_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_size": None}, "local_size: must be an integer >= 1, got None"),
        (
            {"local_size": 262_144},
            r"local_size: must be <= the chunk size less 1 \(262143\), got 262144",
        ),
        ({"chunk_size": 300_000}, r"must be <= the trained length \(262144\), got 300000"),
        (
            {"original_max_position_embeddings": 2_000_000},
            r"must be <= max_position_embeddings \(1010000\), got 2000000",
        ),
        ({"sparse_attention_enabled": True}, "sparse_attention_enabled: is not supported"),
    ],
)
def test_wrong_dual_chunk_attention_is_refused_by_field(
    change: dict[str, Any], message: str
) -> None:
    """Each refusal names the field, the limit and the value."""
    config = {
        **CONFIG,
        "max_position_embeddings": 1_010_000,
        "dual_chunk_attention_config": {**QWEN_1M, **change},
    }
    with pytest.raises(RopeConfigError, match=message):
        native_rope(config)


def test_dual_chunk_attention_beside_a_scaled_table_is_refused() -> None:
    """Nothing published has both."""
    config = {
        **CONFIG,
        "dual_chunk_attention_config": {**QWEN_1M, "chunk_size": 64, "local_size": 16}
        | {"original_max_position_embeddings": 64},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    with pytest.raises(RopeConfigError, match=r"beside a table that is scaled \(linear\)"):
        native_rope(config)
