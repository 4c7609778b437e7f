"""Requests that are refused by their head: framing, number of headers, Host."""

import socket

import httpx
import pytest

from ropewalk.server.access.allowance import KeyMetrics
from ropewalk.server.access.key_ring import KeyRing
from ropewalk.server.access.keys import UNNAMED, ApiKey, KeyTable, digest_of
from ropewalk.server.metrics import MetricFactory
from ropewalk.server.middleware.head_checks import AllowedHosts
from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup.gate import access_policy_of
from tests.server.fuzz.raw_http import address_of, connection, exchange, read_replies
from tests.servers.processes import Server

_TWO_REQUESTS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"%s\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
)
_LENGTH, _CHUNKED = b"Content-Length: 12", b"Transfer-Encoding: chunked"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/no/such/route"])
@pytest.mark.parametrize("headers", [(_LENGTH, _CHUNKED), (_CHUNKED, _LENGTH)])
def test_a_body_of_two_lengths_is_refused_and_nothing_after_it_is_read(
    server: Server, path: str, headers: tuple[bytes, bytes]
) -> None:
    """A proxy in front may have taken the second request for a part of the first."""
    raw = (_TWO_REQUESTS % b"\r\n".join(headers)).replace(b"/v1/completions", path.encode())
    with connection(address_of(server.url)) as sock:
        sock.sendall(raw)
        replies = read_replies(sock, 2, 20)  # fewer than two only if the server closes
    assert [reply.status for reply in replies] == [400]
    assert b'"ambiguous_length"' in replies[0].body
    assert "connection: close" in replies[0].head.lower()


def test_a_refused_head_before_broken_chunks_has_one_answer(attacked: Server) -> None:
    """The head is refused by the application, and the chunk by the protocol."""
    first_line = len(attacked.log)
    raw = (_TWO_REQUESTS % (_LENGTH + b"\r\n" + _CHUNKED)).replace(b"\r\n2\r\n", b"\r\nzz\r\n")
    for _ in range(3):
        replies = exchange(address_of(attacked.url), raw, num_replies=2)
        assert [reply.status for reply in replies] == [400]
    assert httpx.get(f"{attacked.url}/version").status_code == 200
    assert not [line for line in attacked.log[first_line:] if "level=error" in line]


def test_chunks_without_a_length_are_read(server: Server) -> None:
    """The same request without Content-Length is answered, and so is the next one."""
    with connection(address_of(server.url)) as sock:
        sock.sendall(_TWO_REQUESTS % _CHUNKED)
        refused, version = read_replies(sock, 2, 20)
    assert b"`prompt`" in refused.body
    assert version.status == 200


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
    assert (access_policy_of(load_settings(flags), ring, 2048).head.hosts is not None) is is_checked


@pytest.mark.parametrize("name", ["http://a.example", "a.example:8000", "a.example/", "*.*.a", ""])
def test_an_allowed_host_is_a_name_alone(name: str) -> None:
    """A scheme or a port would never match, so it is refused at the start."""
    with pytest.raises(SettingsError, match="allowed_hosts: must be names without scheme, port"):
        load_settings({"allowed_hosts": f"b.example,{name}"})
