"""Access by keys, TLS and origins; and an id for every request."""

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from ropewalk.server.process.certificate import check_certificate
from ropewalk.server.settings.load import SettingsError, load_settings
from tests.servers.processes import Server, run_here, running_server

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/ropewalk-demo"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/no/such/route"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost, its key, and a file of API keys."""
    folder = tmp_path_factory.mktemp("access")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "keys").write_text("third\n\n  fourth \n")
    return folder


@pytest.fixture(scope="module")
def guarded(files: Path) -> Iterator[Server]:
    """One server with keys from a flag and a file, TLS, and one origin."""
    with running_server(
        *("--api-key", "first, second", "--api-key-file", str(files / "keys")),
        *("--ssl-certfile", str(files / "cert.pem"), "--ssl-keyfile", str(files / "key.pem")),
        *("--allowed-origins", "https://example.org"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(guarded: Server, files: Path) -> Iterator[httpx.Client]:
    """A client that trusts that certificate only."""
    context = ssl.create_default_context(cafile=str(files / "cert.pem"))
    with httpx.Client(base_url=guarded.url, verify=context, timeout=30) as made:
        yield made


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_everything_needs_a_key(client: httpx.Client, method: str, path: str) -> None:
    """The key is absent, wrong, cut short, or under another scheme."""
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic first"},
        {"Authorization": "Bearer firs"},
        {"Authorization": "Bearer first,"},
        {"Authorization": "first"},
        {"Authorization": "Bearer"},
        {"x-api-key": "firs"},
        {"Authorization": "Bearer wrong", "x-api-key": "first"},
    ):
        answer = client.request(method, path, headers=headers)
        assert answer.status_code == 401
        if path == "/v1/messages":  # Anthropic's envelope
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.json()["type"] == "error"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/version"])
def test_watchers_need_none(client: httpx.Client, path: str) -> None:
    """An orchestrator requests these paths without a key."""
    assert client.get(path).status_code == 200
    assert client.get(path + "/").status_code in (307, 401), "no door beside the door"


@pytest.mark.parametrize("key", ["first", "second", "third", "fourth"])
def test_any_of_the_keys_opens(client: httpx.Client, key: str) -> None:
    """The accepted keys come from the flag and from the file."""
    for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_openais_client_sends_its_key_over_tls(guarded: Server, client: httpx.Client) -> None:
    """OpenAI's client with a wrong key raises its own AuthenticationError."""
    # Not as a context: it would close the client that the other tests use.
    known = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="second", http_client=client)
    assert known.completions.create(model="ropewalk-demo", prompt="a", max_tokens=1).id
    with pytest.raises(openai.AuthenticationError):
        known.with_options(api_key="none").models.list()


def test_a_certificate_with_another_key_is_refused(files: Path) -> None:
    """The sentence names both files."""
    certificate, keys = files / "cert.pem", files / "keys"
    flags = {"ssl_certfile": str(certificate), "ssl_keyfile": str(keys)}
    told = f"^ssl_certfile: cannot use {certificate} with ssl_keyfile {keys}: "
    with pytest.raises(SettingsError, match=told):
        check_certificate(load_settings(flags))


def test_keys_are_in_no_banner(guarded: Server) -> None:
    """The banner of a server with keys from a flag and a file is searched."""
    assert guarded.url.startswith("https://127.0.0.1:")
    for key in ("first", "second", "third", "fourth"):
        assert key not in guarded.banner


def test_only_named_origins_may_ask(client: httpx.Client) -> None:
    """A browser's credentials are never allowed."""
    asked = {"Access-Control-Request-Method": "POST", "Origin": "https://example.org"}
    allowed = client.options("/v1/completions", headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    assert "access-control-allow-credentials" not in allowed.headers
    other = client.options("/v1/completions", headers={**asked, "Origin": "https://other.org"})
    assert "access-control-allow-origin" not in other.headers


def test_without_the_setting_no_origin_may(server: Server) -> None:
    """Browsers of other origins have no access by default."""
    answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://example.org"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_request_id_is_kept_or_given(server: Server) -> None:
    """Errors have a request id too; an id that could break a header or a log is replaced."""
    for path in ("/v1/models", "/no/such/route"):
        own = httpx.get(server.url + path, headers={"X-Request-Id": "abc-1/2"})
        assert own.headers["x-request-id"] == "abc-1/2"
        given = {httpx.get(server.url + path).headers["x-request-id"] for _ in range(3)}
        assert len(given) == 3
    for bad in ("a b", "x" * 129, ""):
        answer = httpx.get(f"{server.url}/health", headers={"X-Request-Id": bad})
        assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ssl-keyfile", "key.pem"], "ssl_keyfile needs ssl_certfile"),
        (["--ssl-certfile", "/none.pem"], "ssl_certfile: cannot use /none.pem: No such file"),
        (["--api-key-file", "/none"], "api_key_file: cannot read /none: No such file"),
        (["--api-key-file", "/dev/null"], "api_key_file: /dev/null contains no key"),
        (["--api-key", "a,,b"], "api_key: key 2 must be one or more printable"),
    ],
)
def test_a_wrong_access_setting_ends_before_anything_is_loaded(
    arguments: list[str], message: str
) -> None:
    """The command prints a sentence and exits with code 2."""
    ended = run_here("serve", "--port", "0", *arguments)
    assert ended.returncode == 2
    assert f"ropewalk: {message}" in ended.stderr
    assert "loading_weights" not in ended.stderr
