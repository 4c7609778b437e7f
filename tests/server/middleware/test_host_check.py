"""Requests that are refused for their Host header."""

import socket

import httpx
import pytest

from ropewalk.server.access.allowance import KeyMetrics
from ropewalk.server.access.key_ring import KeyRing
from ropewalk.server.access.keys import UNNAMED, ApiKey, KeyTable, digest_of
from ropewalk.server.metrics import MetricFactory
from ropewalk.server.middleware.host_check import AllowedHosts
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.gate import access_policy_of
from tests.server.fuzz.raw_http import address_of, read_replies
from tests.servers.processes import Server


@pytest.mark.parametrize(
    "host",
    [
        *("localhost:8000", "LOCALHOST", "ropewalk.localhost", "127.0.0.1:8000", "10.1.2.3"),
        *("[::1]:80", "host.docker.internal:8000", "localhost.localdomain", "ip6-localhost"),
    ],
)
def test_addresses_and_localhost_are_answered_on_loopback(server: Server, host: str) -> None:
    """No page of another site can have them as its origin."""
    assert httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/health", "/playground/"])
def test_a_foreign_host_is_refused_on_loopback_without_keys(server: Server, path: str) -> None:
    """A page whose name resolves to 127.0.0.1 (DNS rebinding) sends its name."""
    for host in ("evil.example:8000", "127.0.0.1.nip.io", "localhost.evil.example", "[evil]", "a"):
        answer = httpx.post(server.url + path, headers={"Host": host}, json={"prompt": "a"})
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert error["code"] == "host_not_allowed"
        assert error["message"] == (
            f"The Host header must be one of allowed_hosts. Given: {host!r}"
        )


def test_a_request_without_a_host_is_answered(server: Server) -> None:
    """HTTP/1.0 needs none, and no browser speaks it."""
    with socket.create_connection(address_of(server.url), 20) as sock:
        sock.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        (reply,) = read_replies(sock, 1, 20)
    assert reply.status == 200


@pytest.mark.parametrize(
    ("allowed", "host", "is_allowed"),
    [
        ("llm.example.org", "LLM.example.org.:443", True),
        ("llm.example.org", "a.llm.example.org", False),
        ("*.example.org", "llm.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "evilexample.org", False),
        ("*.example.org", "localhost:8000", True),
    ],
)
def test_allowed_names_are_whole_names_or_subdomains(
    allowed: str, host: str, *, is_allowed: bool
) -> None:
    """The case, the port and the last point do not matter."""
    assert AllowedHosts.of([allowed]).allows(host) is is_allowed


@pytest.mark.parametrize(
    ("flags", "has_key", "is_checked"),
    [
        ({}, False, True),
        ({"host": "localhost"}, False, True),
        ({"host": "::1"}, False, True),
        ({"host": "127.0.0.1"}, True, False),
        ({"host": "0.0.0.0"}, False, False),  # noqa: S104  # nothing listens
        ({"allowed_hosts": "*"}, False, False),
        ({"allowed_hosts": "a.example", "host": "0.0.0.0"}, True, True),  # noqa: S104
    ],
)
def test_hosts_are_checked_where_no_key_protects_or_if_asked(
    flags: dict[str, str], *, has_key: bool, is_checked: bool
) -> None:
    """A container listens on all addresses, and a client with a key is no stranger's page."""
    keys = KeyTable((ApiKey(UNNAMED, digest_of("k")),), {})
    ring = KeyRing(keys, KeyMetrics(MetricFactory())) if has_key else None
    assert (access_policy_of(load_settings(flags), ring, 2048).hosts is not None) is is_checked


@pytest.mark.parametrize("name", ["http://a.example", "a.example:8000", "a.example/", "*.*.a", ""])
def test_an_allowed_host_is_a_name_alone(name: str) -> None:
    """A scheme or a port would never match, so it is refused at the start."""
    with pytest.raises(SettingsError, match="allowed_hosts: must be names without scheme, port"):
        load_settings({"allowed_hosts": f"b.example,{name}"})
