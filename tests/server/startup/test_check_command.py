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
