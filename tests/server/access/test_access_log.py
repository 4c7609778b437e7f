"""One line a request: what it holds, when it is written, and what is left out."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.access.log_reader import line_of, lines_of, request_lines
from tests.servers.processes import Server, running_server

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
LONG = {"prompt": "a", "max_tokens": 1800, "ignore_eos": True, "temperature": 2, "seed": 1}
PROBES = ("/health", "/live", "/ready", "/metrics")


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that logs all routes and knows two named keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("alice:secret-a\nbob:secret-b\n")
    with running_server("--access-log", "all", "--api-key-file", str(keys)) as running:
        yield running


def client_of(server: Server, key: str = "secret-a", **headers: str) -> httpx.Client:
    """A client with a key."""
    bearer = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers={**bearer, **headers}, timeout=60)


@pytest.mark.parametrize("form", ["whole", "stream"])
def test_a_line_has_what_was_asked_applied_and_spent(logged: Server, form: str) -> None:
    """The id is that of the response."""
    stream = form == "stream"
    body = {"prompt": [7] * 300, "max_tokens": 5, "n": 2, "ignore_eos": True, "stream": stream}
    with client_of(logged, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01") as client:
        answer = client.post("/v1/completions", json={**body, "cache_salt": form})
    (line,) = lines_of(logged, [answer])
    assert "traceparent" not in answer.headers
    told = {name: line[name] for name in line if name not in {"timestamp", "request_id"}}
    seconds, first_token_s = told.pop("seconds"), told.pop("first_token_s")
    assert 0 < first_token_s < seconds
    assert told == {
        "level": "info",
        "event": "request",
        "key": "alice",
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "aborted": False,
        "trace_id": TRACE,
        "deployment": "ropewalk-demo",
        "rope_type": "yarn",
        "factor": 2.0,
        "tier": 512,
        "prompt_tokens": 300,
        "cached_tokens": 0,
        "completion_tokens": 10,
    }


def test_cached_tokens_are_those_of_usage(logged: Server) -> None:
    """The second of two equal prompts finds whole pages."""
    body = {"prompt": [9] * 200, "max_tokens": 1}
    with client_of(logged) as client:
        answers = [client.post("/v1/completions", json=body) for _ in range(2)]
    assert [line["cached_tokens"] for line in lines_of(logged, answers)] == [0, 192]
    assert answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


@pytest.mark.parametrize("form", ["whole", "stream"])
def test_a_client_that_leaves_has_its_line(logged: Server, form: str) -> None:
    """The line comes when the engine has ended the answer, with the tokens until then."""
    stream = form == "stream"
    name = f"left-{form}"
    with client_of(logged, **{"X-Request-Id": name}) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                next(line for line in answer.iter_lines() if line.startswith("data"))
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=LONG, timeout=0.3)
    line = line_of(logged, name)
    assert line["aborted"] is True
    assert line["status"] == (200 if stream else 499)
    assert stream <= line["completion_tokens"] < 1800  # a busy machine may not have begun


def test_refused_requests_have_lines_without_a_clients_text(logged: Server) -> None:
    """A wrong key has no name, and a path that no route has is `other`."""
    first = len(logged.log)
    marker = "marker-of-a-client"
    with client_of(logged, traceparent=marker) as client:
        wrong = {"Authorization": f"Bearer {marker}"}
        answers = [
            client.post("/v1/completions", json={"prompt": marker}, headers=wrong),
            client.get(f"/{marker}", params={marker: marker}),
            client.request(marker, "/v1/models"),
            client.post("/v1/completions", json={"prompt": marker, "model": marker}),
            client.post("/v1/chat/completions", json={marker: marker}),
            client.get(f"/v1/models/{marker}"),
            client.get("/docs", headers=wrong),
        ]
    lines = lines_of(logged, answers)
    assert [(each["key"], each["method"], each["route"], each["status"]) for each in lines] == [
        (None, "POST", "/v1/completions", 401),
        ("alice", "GET", "other", 404),
        ("alice", "other", "/v1/models", 405),
        ("alice", "POST", "/v1/completions", 404),
        ("alice", "POST", "/v1/chat/completions", 400),
        ("alice", "GET", "/v1/models/{name:path}", 404),
        (None, "GET", "other", 401),
    ]
    assert not any("trace_id" in each for each in lines)
    assert not [line for line in logged.log[first:] if marker in line or "secret" in line]


def test_probes_and_metrics_have_no_line(logged: Server) -> None:
    """Neither with a key nor without one."""
    with client_of(logged) as client:
        for path in PROBES:
            client.get(path)
            client.head(path)
        answer = client.get("/version")
    assert [each["route"] for each in lines_of(logged, [answer])] == ["/version"]
    assert {each["route"] for each in request_lines(logged)}.isdisjoint(PROBES)


def test_by_default_generating_routes_have_lines(server: Server) -> None:
    """Their refusals have lines, too."""
    quiet = [httpx.get(server.url + path) for path in ("/v1/models", "/version", "/none", *PROBES)]
    quiet.append(httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}))
    body = {"prompt": "a", "max_tokens": 1}
    answers = [
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30),
        httpx.post(f"{server.url}/v1/chat/completions", json={}),
    ]
    lines = lines_of(server, answers)
    assert [(each["route"], each["status"], each["key"]) for each in lines] == [
        ("/v1/completions", 200, None),
        ("/v1/chat/completions", 400, None),
    ]
    written = {each["request_id"] for each in request_lines(server)}
    assert written.isdisjoint(each.headers["x-request-id"] for each in quiet)


def test_off_writes_no_line(tmp_path: Path) -> None:
    """The word in a YAML file, which YAML reads as a switch."""
    (tmp_path / "a.yaml").write_text("access_log: off\n")
    with running_server("--config", str(tmp_path / "a.yaml")) as quiet:
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{quiet.url}/v1/completions", json=body, timeout=30).is_success
        httpx.post(f"{quiet.url}/v1/completions", json={})
    assert not request_lines(quiet)
