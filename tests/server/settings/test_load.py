"""Settings: their precedence, and the messages for wrong values."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ropewalk.server.ray.sent_settings import sent_settings
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
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
        ("prot: 1\nport: x", r"Did you mean `port`\?\nport: must be an integer, got 'x'"),
        ("port:", "port: must be an integer, got no value .from .*ropewalk.yaml"),
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
        ("gguf_file: model.gguf", "gguf_file needs the folder of a model"),
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
            r"deployments: a: port is not a setting of a deployment .*\. It has .*rope_policy, ",
        ),
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
        ("tensor-parallel-size: 2", r"Did you mean `tensor_parallel_size`\?$"),
        ("deployments: [5]", "deployments: item 1: must be an object, got 5"),
        ("deployments: [{name: a}]\nserved_model_name: b", "served_model_name and deployments"),
    ],
)
def test_a_wrong_file_names_file_setting_and_value(tmp_path: Path, text: str, message: str) -> None:
    """The message also states the accepted values."""
    file = tmp_path / "ropewalk.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_settings({"config": str(file)})


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    """A file that is not UTF-8 gets a sentence like a missing one."""
    with pytest.raises(SettingsError, match=r"config: cannot read .*: No such file"):
        load_settings({"config": str(tmp_path / "none.yaml")})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="it is not UTF-8"):
        load_settings({"config": str(tmp_path / "binary")})


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"port": "70000"},
            r"port: must be at most 65535, got '70000' \(from the command line\)$",
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
        ({"device": "tpu"}, "device: must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"kv_cache_gib": "nan"}, "kv_cache_gib: .*finite"),
        ({"kv_cache_gib": "1", "kv_cache_tokens": "5"}, "both size the cache"),
        (
            {"max_num_batched_tokens": "8", "max_num_seqs": "9"},
            r"must be >= max_num_seqs \(9\), got 8",
        ),
        ({"model": ""}, "model: .*at least 1"),
        (
            {"revision": "main"},
            "revision is for a model by hub id, and the embedded model has none",
        ),
        (
            {"model": "/models/x", "revision": "main"},
            "revision is for a model by hub id, and the path /models/x has",
        ),
        (
            {"kv_cache_dtype": "int8", "page_size": "16"},
            "page_size must be a multiple of 32 for kv_cache_dtype int8, got 16",
        ),
        (
            {"kv_cache_dtype": "int8", "tensor_parallel_size": "2"},
            "int8 is for a model in one process: tensor_parallel_size must be 1, got 2",
        ),
        ({"kv_disk": "/x"}, "kv_disk needs kv_disk_gib, the size of the folder, got /x"),
        ({"kv_disk_gib": "2"}, "kv_disk_gib needs kv_disk, the folder, got 2"),
        ({"kv_disk": "/x", "kv_disk_gib": "0"}, "kv_disk_gib: must be above 0, got '0'"),
        (
            {"kv_store": "valkey://kv", "kv_disk": "/x", "kv_disk_gib": "1"},
            "kv_disk and kv_store exclude each other, got /x and a store",
        ),
        (
            {"kv_store": "valkey://kv", "tensor_parallel_size": "2"},
            "kv_store is for a model in one process, .* must be 1, got 2",
        ),
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


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_key_does_not_open_the_server(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--api-key "$KEY"` is empty if the variable is not set."""
    with pytest.raises(SettingsError, match="api_key: must contain a key"):
        load_settings({"api_key": given})
    monkeypatch.setenv("ROPEWALK_API_KEY", given)
    with pytest.raises(SettingsError, match="API_KEY"):
        load_settings({})
