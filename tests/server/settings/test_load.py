"""Settings: their precedence, and the messages for wrong values."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ropewalk.server.ray.sent_settings import sent_settings
from ropewalk.server.settings.fields import unit_of
from ropewalk.server.settings.load import SECTIONS, ServeSettings, SettingsError, load_settings
from ropewalk.server.settings.request_sections import ReplicaSettings


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each value is taken whole: a rope block of the file is not mixed with a flag's."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(
        "port: 9000\nmax_num_seqs: 6\npage_size: 32\n"
        "rope_scaling: {rope_type: yarn, factor: 8.0, beta_fast: 16}\n"
    )
    monkeypatch.setenv("ROPEWALK_PORT", "9001")
    monkeypatch.setenv("ROPEWALK_MAX_NUM_SEQS", "7")
    linear = '{"rope_type": "linear", "factor": 2}'
    flags = {"port": "9002", "config": str(file), "rope_scaling": linear}
    settings = load_settings(flags)
    assert (settings.port, settings.max_num_seqs) == (9002, 7)
    assert (settings.page_size, settings.host) == (32, "127.0.0.1")
    assert settings.rope_scaling == {"rope_type": "linear", "factor": 2}
    monkeypatch.setenv("ROPEWALK_CONFIG", str(file))
    assert load_settings({}).rope_scaling == {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16}


# A server behind it has others, or none.
_OF_THE_ROUTER = {
    *("host", "port", "ssl_certfile", "ssl_keyfile", "allowed_hosts", "max_connections"),
    "playground",
    *("router_key", "router_only"),
    *ReplicaSettings.model_fields,
}


@pytest.mark.parametrize("name", sorted(set(ServeSettings.model_fields) - {"config"}))
def test_every_setting_may_stand_in_the_file(tmp_path: Path, name: str) -> None:
    """The value has YAML's own type, or is the text of a flag."""
    values: dict[str, Any] = {
        "deployments": [{"name": "a"}, {"name": "b", "rope_policy": "grow"}],
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "rope_policy": "grow",
        "override_generation_config": {"temperature": 0.5},
        "rope_tiers": [1, 2],
        "allowed_rope_types": ["yarn"],
        "allowed_positions": ["rerope"],
        "allowed_chat_template_kwargs": [],
        "dtype": "float32",
        "weights": "int8",
        "activations": "int8",
        "device": "cpu",
        "trust_remote_code": True,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "exact_batches": True,
        "max_num_batched_tokens": 64,
        "api_key": ["a", "b"],
        "open_metrics": True,
        "playground": "never",
        "access_log": "all",
        "keys": [{"name": "a", "max_running": 2, "max_requests_per_minute": 9}],
        "ssl_keyfile": None,
        "router_key": "a-key-of-the-router",
        "router_only": True,
        "allowed_origins": ["https://example.org"],
        "allowed_hosts": ["llm.example.org"],
        "max_body_bytes": 4096,
        "tool_format": "hermes",
        "reasoning": "inline",
        "exact_rope_factors": [1.3, 3.0],
        "model_aliases": {"gpt-4o": "a"},
        "scheduling_policy": "priority",
        "share_prefixes": True,
        "kv_cache_dtype": "int4",
        "kv_store": "valkey://:secret@kv:7/1",
        "log_format": "json",
        "log_level": "warning",
        "traces": True,
    }
    field = ServeSettings.model_fields[name]
    is_text = "str" in str(field.annotation) or "Path" in str(field.annotation)
    value = values.get(name, "text" if is_text else 7)
    file = tmp_path / "ropewalk.yaml"
    beside: dict[str, object] = {}
    if name in ("revision", "gguf_file"):
        beside = {"model": "owner/name"}
    elif name == "max_replicas":
        beside = {"replicas": 2}
    elif name.startswith("kv_disk"):
        beside = {"kv_disk": "text", "kv_disk_gib": 7}
    elif name == "router_only":
        beside = {"router_key": "a-key-of-the-router"}
    file.write_text(yaml.safe_dump({**beside, name: value}))
    found = load_settings({"config": str(file)})
    if name == "deployments":
        assert found.deployments is not None
        named = [(entry.name, entry.rope_policy) for entry in found.deployments]
        assert named == [("a", None), ("b", "grow")]
    else:
        assert found.model_dump(mode="json")[name] == value
    sent = sent_settings(found, "a-key-of-the-router").model_dump(mode="json", exclude_unset=True)
    behind = load_settings(json.loads(json.dumps(sent)))
    if name not in _OF_THE_ROUTER:
        assert getattr(behind, name) == getattr(found, name), "a server on Ray has the setting"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "prot: 9000",
            r"prot in .*ropewalk.yaml is not a setting of ropewalk\. Did you mean `port`\?$",
        ),
        ("config: x.yaml", "config in .*ropewalk.yaml must be removed: a file cannot name another"),
        ("zzz: 1", r"not a setting of ropewalk\. `ropewalk serve --help` lists the settings\.$"),
        ("prot: 1\nport: x", r"Did you mean `port`\?\nport: must be an integer, got 'x'"),
        ("port:", "port: must be an integer, got no value .from .*ropewalk.yaml"),
        ("host: true", "host: must be a string, got true .from"),
        ("rope_tiers: [true, 2]", "rope_tiers: item 1: must be a number, got true .from"),
        ("dtype: floatt32", r"float16, got 'floatt32' .*\. Did you mean `float32`\?$"),
        (
            "port: 1\nport: 2",
            "ropewalk.yaml cannot be used: line 2, column 1: 'port' is given twice",
        ),
        (
            "replicas: 2\nrouter_key: a-key-of-the-router",
            "router_key and router_only are for .* give them or replicas, got 2 replicas$",
        ),
        ("max_replicas: 3", "max_replicas needs replicas, got 3$"),
        ("replicas: 4\nmax_replicas: 3", r"max_replicas must be >= replicas \(4\), got 3$"),
        (
            "deployments: [{name: a}, {name: b}, {name: a}, {name: b}]\nrope_policy: grow\n"
            "max_num_seqs: 9\nmax_num_batched_tokens: 8\nssl_keyfile: a",
            "(?s)^max_num_batched_tokens.*\nssl_keyfile.*\nrope_policy.*'a' twice\n.*'b' twice$",
        ),
        ("port: [", "is not YAML: line 1, column"),
        ("- port", "must contain settings as `name: value`"),
        ("deployments: [{rope_policy: grow}]", "deployments: item 1: name: is missing .from"),
        (
            "deployments: [{name: a, port: 1}]",
            "deployments: a: port is not a setting of a deployment",
        ),
        (
            "deployments: [{name: a, rope_polcy: grow}]",
            r"deployments: a: rope_polcy is not a setting of .*\. Did you mean `rope_policy`\?$",
        ),
        ("deployments: [{name: a, port: 1}]", r"\. It has .*rope_policy, .*, name\.$"),
        (
            "deployments: [{name: a}, {name: b, rope_policy: grov}]",
            r"deployments: b: rope_policy: must be by_.*, got 'grov' .*Did you mean `grow`\?$",
        ),
        (
            "deployments: [{name: a, positions: {method: sinks}}]\nrope_scaling: {factor: 2}",
            r"(?s)deployments: a: positions is not a setting of a deployment .*"
            r"\. It belongs inside rope_scaling: {positions: \.\.\.}\.\n"
            "rope_scaling and deployments exclude each other",
        ),
        ("positions: {method: sinks}", "is not a setting of .* inside rope_scaling: {positions"),
        ("tensor-parallel-size: 2", r"Did you mean `tensor_parallel_size`\?$"),
        ("deployments: [5]", "deployments: item 1: must be an object, got 5"),
        ("deployments: [{name: a}, {name: a}]", "name must be given once, got 'a' twice"),
        ("deployments: [{name: a}]\nrope_policy: grow", "rope_policy and deployments exclude"),
        ("deployments: [{name: a}]\nserved_model_name: b", "served_model_name and deployments"),
    ],
)
def test_a_wrong_file_names_file_setting_and_value(tmp_path: Path, text: str, message: str) -> None:
    """The message also states the accepted values."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_settings({"config": str(file)})


def test_numbers_with_one_reading_are_read(tmp_path: Path) -> None:
    """Hexadecimal and grouped digits mean the same in every version of YAML."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text("port: 0x1f\nmax_num_batched_tokens: 1_000\ngpu_memory_utilization: 0.5")
    found = load_settings({"config": str(file)})
    assert (found.port, found.max_num_batched_tokens) == (31, 1000)
    assert found.gpu_memory_utilization == 0.5


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    """A file that is not UTF-8 gets a sentence like a missing one."""
    with pytest.raises(SettingsError, match=r"config: cannot read .*: No such file"):
        load_settings({"config": str(tmp_path / "none.yaml")})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="it is not UTF-8"):
        load_settings({"config": str(tmp_path / "binary")})


def test_deployments_come_from_a_flag_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag's text is JSON, and the environment may hold it as well."""
    text = '[{"name": "a", "rope_scaling": {"rope_type": "linear", "factor": 2}}]'
    monkeypatch.setenv("ROPEWALK_DEPLOYMENTS", text)
    for flags in ({}, {"deployments": text}):
        found = load_settings(flags).deployments
        assert found is not None
        assert found[0].rope_scaling == {"rope_type": "linear", "factor": 2}


def test_an_older_name_of_a_policy_is_read_as_the_newer_one(tmp_path: Path) -> None:
    """Files of release 0.1 have `pinned`, which is `grow` now."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text("rope_policy: pinned\n")
    found = [
        load_settings(flags).rope_policy
        for flags in ({"config": str(path)}, {"rope_policy": "pinned"}, {"rope_policy": "grow"}, {})
    ]
    assert found == ["grow", "grow", "grow", None]
    deployments = load_settings(
        {"deployments": '[{"name": "a", "rope_policy": "pinned"}]'}
    ).deployments
    (entry,) = deployments or ()
    assert entry.rope_policy == "grow"


def test_lists_and_json_are_read_from_strings() -> None:
    """Flags and variables hold lists and JSON as strings."""
    settings = load_settings(
        {
            "rope_tiers": "1,2,4.5",
            "rope_scaling": '{"rope_type": "linear", "factor": 2}',
            "allowed_rope_types": "default,yarn",
        }
    )
    assert settings.rope_tiers == (1.0, 2.0, 4.5)
    assert settings.rope_scaling == {"rope_type": "linear", "factor": 2}
    assert settings.allowed_rope_types == ("default", "yarn")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"port": "70000"},
            r"port: must be at most 65535, got '70000' \(from the command line\)$",
        ),
        (
            {"rope_policy": "shrink"},
            "rope_policy: must be by_position, .* or fixed, got 'shrink'",
        ),
        (
            {"rope_scaling": "{yarn}"},
            r"rope_scaling: must be JSON \(.* character 2\), got '{yarn}'",
        ),
        ({"rope_scaling": '{"a": 1, "a": 2}'}, r"must have each key once \('a' is given twice\)"),
        (
            {"deployments": '[{"name": "q", "max_model_len": "x"}]'},
            "deployments: q: max_model_len: must be an integer, got 'x'",
        ),
        ({"rope_tiers": "1,x"}, "rope_tiers: item 2: must be a number, got 'x'"),
        ({"dtype": "int8"}, "dtype: must be .*float32.*, got 'int8'"),
        ({"device": "tpu"}, "device: must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"gpu_memory_utilization": "nan"}, "gpu_memory_utilization: "),
        ({"kv_cache_gib": "nan"}, "kv_cache_gib: .*finite"),
        ({"kv_cache_gib": "1", "kv_cache_tokens": "5"}, "both size the cache"),
        (
            {"max_num_batched_tokens": "8", "max_num_seqs": "9"},
            r"must be >= max_num_seqs \(9\), got 8",
        ),
        ({"model": ""}, "model: .*at least 1"),
    ],
)
def test_a_wrong_value_names_setting_value_and_what_is_accepted(
    flags: dict[str, Any], message: str
) -> None:
    """Each wrong value takes one line of the message."""
    with pytest.raises(SettingsError, match=message):
        load_settings(flags)


def test_contradictions_are_told_beside_wrong_values() -> None:
    """A contradiction with a wrong value is none: that value is not known."""
    flags = {
        "port": "x",
        "max_num_batched_tokens": "y",
        "max_num_seqs": "4096",
        "kv_cache_gib": "1",
        "kv_cache_tokens": "5",
    }
    with pytest.raises(SettingsError) as caught:
        load_settings(flags)
    assert sorted(str(caught.value).split("\n")) == [
        "kv_cache_gib and kv_cache_tokens both size the cache: give one",
        "max_num_batched_tokens: must be an integer, got 'y' (from the command line)",
        "port: must be an integer, got 'x' (from the command line)",
    ]


def test_names_may_have_spaces_round_their_commas() -> None:
    """An empty text is an empty list of names."""
    settings = load_settings(
        {"allowed_rope_types": "yarn, linear", "allowed_chat_template_kwargs": ""}
    )
    assert settings.allowed_rope_types == ("yarn", "linear")
    assert settings.allowed_chat_template_kwargs == ()


def test_a_size_of_the_cache_takes_the_place_of_the_files(tmp_path: Path) -> None:
    """The two sizes may have different units."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text("kv_cache_gib: 4")
    settings = load_settings({"config": str(file), "kv_cache_tokens": "1000"})
    assert (settings.kv_cache_gib, settings.kv_cache_tokens) == (None, 1000)


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable does not silently leave the default."""
    monkeypatch.setenv("ROPEWALK_MAX_NUM_SEQ", "7")
    with pytest.raises(
        SettingsError,
        match=r"ROPEWALK_MAX_NUM_SEQ in the environment is not a setting .*\. Did you mean",
    ):
        load_settings({})


def test_every_setting_has_a_help_text() -> None:
    """Every help text ends with a full stop."""
    for name, field in ServeSettings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_every_setting_has_a_unit_and_a_section() -> None:
    """Each setting is in exactly one section."""
    in_sections = [name for section in SECTIONS for name in section.model_fields]
    assert sorted(in_sections) == sorted(ServeSettings.model_fields)
    for name, field in ServeSettings.model_fields.items():
        assert unit_of(field), name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ROPE_SCALING", '{"rope_type": "yarn", "factor": 2, "factor": 4}'),
        ("DEPLOYMENTS", '[{"name": "a", "name": "b"}]'),
    ],
)
def test_a_key_given_twice_in_a_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """A variable is read as strictly as a flag and the file."""
    monkeypatch.setenv(f"ROPEWALK_{name}", text)
    with pytest.raises(SettingsError, match="must have each key once"):
        load_settings({})


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_key_does_not_open_the_server(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--api-key "$KEY"` is empty if the variable is not set."""
    with pytest.raises(SettingsError, match="api_key: must contain a key"):
        load_settings({"api_key": given})
    monkeypatch.setenv("ROPEWALK_API_KEY", given)
    with pytest.raises(SettingsError, match="API_KEY"):
        load_settings({})
