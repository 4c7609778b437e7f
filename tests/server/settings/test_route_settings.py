"""The settings of `ropewalk route`, from flags, environment and file."""

from pathlib import Path

import pytest

from ropewalk.server.settings.load import SettingsError
from ropewalk.server.settings.route_settings import load_route_settings
from tests.servers.processes import run_here

URL = "http://10.0.0.1:8000"


def test_flags_win_over_variables_and_those_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"servers: [{URL}, http://servers.example]\nport: 1\nwait_seconds: 2\n")
    monkeypatch.setenv("ROPEWALK_PORT", "3")
    monkeypatch.setenv("ROPEWALK_CONFIG", str(file))
    found = load_route_settings({})
    assert found.servers == (URL, "http://servers.example")
    assert (found.port, found.wait_seconds) == (3, 2.0)
    assert load_route_settings({"port": "4"}).port == 4


@pytest.mark.parametrize(
    ("servers", "told"),
    [
        ((), "servers must have an address"),
        (("10.0.0.1:8000",), "must be addresses as http://10.0.0.1:8000"),
        (("http://10.0.0.1:8000/v1",), "without a path"),
        (("http://10.0.0.1:0",), "must be addresses"),
        (("http://10.0.0.1:99999",), "must be addresses"),
        (("http://a", "http://a/"), "must have each address once"),
    ],
)
def test_addresses_are_checked(servers: tuple[str, ...], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        load_route_settings({"servers": servers})


def test_wrong_addresses_are_shown_as_they_were_given() -> None:
    ended = run_here("route", "foo", "http://a")
    assert ended.returncode == 2
    assert ended.stderr.endswith("a path, got 'foo', 'http://a' (from the command line)\n")


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("server: [http://a]\n")
    with pytest.raises(SettingsError, match=r"server in .* is not a setting.*servers"):
        load_route_settings({"config": file})


@pytest.mark.parametrize("command", [("route", URL), ("serve",)])
def test_a_wrong_key_of_the_router_is_not_repeated(command: tuple[str, ...]) -> None:
    """It is a secret, although it is too short."""
    ended = run_here(*command, "--router-key", "too-short")
    assert ended.returncode == 2
    assert "router_key: must have at least 16 characters" in ended.stderr
    assert "too-short" not in ended.stderr
