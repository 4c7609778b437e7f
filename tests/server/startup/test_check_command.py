"""`config check` refuses what `serve` would refuse before it loads a model."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from server.startup.check_command import check


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("api_key_file: /nowhere/keys", "api_key_file: cannot read /nowhere/keys"),
        ("ssl_certfile: /nowhere/cert.pem", "/nowhere/cert.pem"),
        ("host: 999.1.1.1", "cannot listen on host 999.1.1.1"),
        ("host: ''", "host"),
    ],
)
def test_files_and_the_address_are_checked(tmp_path: Path, line: str, sentence: str) -> None:
    """The exit code is 2, and the sentence names the setting and the value."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text(f"{line}\n")
    ended = CliRunner().invoke(check, [str(path)])
    assert ended.exit_code == 2
    assert sentence in ended.stderr


_ENTRIES = {
    "rope": (
        "  - {name: a, rope_scaling: {rope_type: yarn, factor: 0.5}}\n"
        "  - {name: b, rope_scaling: {rope_type: yarm, factor: 2}}\n",
        ["deployments: a: rope_scaling: factor", "deployments: b: rope_scaling: rope_type"],
    ),
    "length": (
        "  - {name: a, rope_scaling: {rope_type: yarn, factor: 8}, max_model_len: 512}\n"
        "  - {name: b, rope_scaling: {rope_type: yarn, factor: 8}, max_model_len: 1024}\n"
        "kv_cache_tokens: 256\n",
        ["deployments: a: max_model_len", "deployments: b: max_model_len"],
    ),
}


@pytest.mark.parametrize("case", _ENTRIES)
def test_wrong_deployments_are_reported_together(tmp_path: Path, case: str) -> None:
    """Each has a line of its own."""
    entries, beginnings = _ENTRIES[case]
    path = tmp_path / "ropewalk.yaml"
    path.write_text(f"deployments:\n{entries}")
    ended = CliRunner().invoke(check, [str(path)])
    assert ended.exit_code == 2
    lines = ended.stderr.splitlines()
    assert len(lines) == len(beginnings)
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(f"ropewalk: {beginning}")
