"""Settings: precedence, and what a wrong value is told."""

from typing import Any

import pytest

from server.settings import ServeSettings, SettingsError, load_settings


def test_flags_beat_the_environment_which_beats_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """in that order"""
    monkeypatch.setenv("ROPEWALK_PORT", "9001")
    monkeypatch.setenv("ROPEWALK_MAX_NUM_SEQS", "7")
    settings = load_settings({"port": "9002"})
    assert (settings.port, settings.max_num_seqs, settings.host) == (9002, 7, "127.0.0.1")


def test_lists_and_json_are_read_from_strings() -> None:
    """as flags and variables give them"""
    settings = load_settings(
        {
            "rope_tiers": "1,2,4.5",
            "rope_scaling": '{"rope_type": "linear", "factor": 2}',
            "allowed_rope_types": "default,yarn",
            "context_buckets": "64,128",
        }
    )
    assert settings.rope_tiers == (1.0, 2.0, 4.5)
    assert settings.rope_scaling == {"rope_type": "linear", "factor": 2}
    assert settings.allowed_rope_types == ("default", "yarn")
    assert settings.context_buckets == (64, 128)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"port": "70000"},
            r"port: input should be less than or equal to 65535, got '70000' \(from the command",
        ),
        (
            {"rope_policy": "shrink"},
            "rope_policy: input should be 'fixed', .*'grow-exact', got 'shrink'",
        ),
        ({"rope_scaling": "{yarn}"}, "rope_scaling: is not JSON"),
        ({"rope_tiers": "1,x"}, "rope_tiers.1: "),
        ({"dtype": "int8"}, "dtype: .*'float32'.*, got 'int8'"),
        ({"device": "tpu"}, "device: .*got 'tpu'"),
        ({"kv_cache_gib": "nan"}, "kv_cache_gib: .*finite"),
        ({"kv_cache_gib": "1", "kv_cache_tokens": "5"}, "both size the cache"),
        ({"max_num_batched_tokens": "8"}, r"must be >= max_num_seqs \(32\), got 8"),
        ({"rope_tiers": "1,4,2"}, "rope_tiers: must rise strictly from 1 or more, got '1,4,2'"),
        ({"context_buckets": "5,4"}, "context_buckets: must rise strictly"),
        ({"context_buckets": "1.9"}, "context_buckets.0: .*integer"),
        ({"context_buckets": ",".join(map(str, range(1, 14)))}, "context_buckets: .*at most 11"),
        ({"threads": "100000"}, "threads: .*less than or equal to 512, got '100000'"),
        ({"served_model_name": ""}, "served_model_name: .*at least 1"),
        ({"page_size": "2"}, "page_size: .*greater than or equal to 4, got '2'"),
    ],
)
def test_a_wrong_value_names_setting_value_and_what_is_accepted(
    flags: dict[str, Any], message: str
) -> None:
    """one line each"""
    with pytest.raises(SettingsError, match=message):
        load_settings(flags)


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """not the default in silence"""
    monkeypatch.setenv("ROPEWALK_MAX_NUM_SEQ", "7")
    with pytest.raises(
        SettingsError, match="ROPEWALK_MAX_NUM_SEQ in the environment is no setting"
    ):
        load_settings({})


def test_every_setting_has_a_help_text() -> None:
    """that ends like a sentence"""
    for name, field in ServeSettings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
