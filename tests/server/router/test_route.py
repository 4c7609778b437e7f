"""`ropewalk route` in front of real servers: the same answers, whichever server is lost."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest

from tests.doubles.waiting import wait_until
from tests.server.router.other_server import OtherServer, other_server
from tests.servers.metrics import samples_of, total
from tests.servers.paced import MODULE, slowed
from tests.servers.processes import Server, running_server, without_replicas

pytestmark = without_replicas

KEY = "a-key-of-the-router"
_IDS = re.compile(
    rb"(cmpl|chatcmpl|resp|msg|rs|fc)[-_][0-9a-f]{32}|\"(created|(created|completed)_at)\": ?[0-9]+"
)
FLAGS = ("--threads", "1", "--kv-cache-tokens", "16384", "--router-key", KEY)
ROUTER = ("--router-key", KEY, "--check-seconds", "0.1", "--silence-seconds", "3")
HASTY = (*ROUTER[:-1], "0.7")  # for servers that are stopped
NUM_TOKENS = 100  # of an answer that a signal has to meet: ten seconds of a server that is slowed


def serving(*flags: str) -> AbstractContextManager[Server]:
    """A server that `slowed` can slow."""
    return running_server(*FLAGS, *flags, module=MODULE)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with serving() as first, serving() as second:
        yield [first, second]


@contextmanager
def routed(*urls: str, flags: tuple[str, ...] = ROUTER, num_ready: int) -> Iterator[str]:
    """The URL of a router that has found so many servers ready."""
    with running_server(*urls, *flags, subcommand="route") as router:
        wait_until(lambda: metric(router.url, 'servers{state="ready"}') == num_ready)
        yield router.url


@pytest.fixture(scope="module")
def router(servers: list[Server]) -> Iterator[str]:
    with routed(*(each.url for each in servers), num_ready=2) as url:
        yield url


@pytest.fixture(scope="module")
def hasty_router(servers: list[Server]) -> Iterator[str]:
    with routed(*(each.url for each in servers), flags=HASTY, num_ready=2) as url:
        yield url


def metric(url: str, name: str) -> float:
    """A number of the router's own page."""
    start = f"ropewalk_router_{name} "
    page = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in page if line.startswith(start))


def events(data: bytes) -> list[bytes]:
    """The events of a stream without comments, and with no id or time that differs by run."""
    found = [each for each in data.split(b"\n\n") if each and not each.startswith(b":")]
    return [_IDS.sub(b"", re.sub(rb'"cached_tokens": ?[0-9]+', b"", each)) for each in found]


def running(server: Server) -> float:
    """The requests that a server computes."""
    return total(samples_of(server), "ropewalk_requests_running")


class Reader(threading.Thread):
    """Reads a stream, and tells when a part of it has come."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.request = url + path, body
        self.data = b""
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        url, body = self.request
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            for piece in answer.iter_raw():
                self.data += piece
                if self.data.count(b"data: ") > 5:
                    self.has_begun.set()
        self.has_begun.set()


def begun(url: str, asked: list[tuple[str, dict[str, Any]]]) -> list[Reader]:
    """Readers of streams, when a part of each has come."""
    readers = [Reader(url, path, body) for path, body in asked]
    for each in readers:
        assert each.has_begun.wait(60)
    return readers


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


def body_for(path: str, number: int, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """A stream of an API."""
    text = f"import os  # {number}\n"
    body: dict[str, Any] = {"temperature": 1.0, "stream": True, "seed": 100 + number}
    if path.endswith("/completions") and "chat" not in path:
        return {**body, "prompt": text, "max_tokens": num_tokens, "min_tokens": num_tokens}
    messages = [{"role": "user", "content": text}]
    if path.endswith("/chat/completions"):
        return {**body, "messages": messages, "max_tokens": num_tokens, "min_tokens": num_tokens}
    if path.endswith("/responses"):
        return {**body, "input": text, "max_output_tokens": num_tokens}
    return {**body, "messages": messages, "max_tokens": num_tokens}


def alone(server: Server, asked: list[tuple[str, dict[str, Any]]]) -> list[list[bytes]]:
    """The events of a server that no router is in front of."""

    def stream(request: tuple[str, dict[str, Any]]) -> list[bytes]:
        return events(httpx.post(server.url + request[0], json=request[1], timeout=60).content)

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(stream, asked))


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_those_of_a_server(path: str, router: str, servers: list[Server]) -> None:
    """Streams and whole answers, but for ids and times."""
    for stream in (True, False):
        body = {**body_for(path, 1), "stream": stream}
        direct, passed = (
            httpx.post(url + path, json=body, timeout=60) for url in (servers[0].url, router)
        )
        assert direct.status_code == passed.status_code == 200, passed.text
        assert events(passed.content) == events(direct.content)
        names = {"date", "x-request-id", "content-length"}
        heads = [set(each.headers) | names for each in (direct, passed)]
        assert heads[0] == heads[1]


def test_other_routes_and_refusals_are_passed_on(router: str, servers: list[Server]) -> None:
    """A mistake is answered once, by the words of a server."""
    asked: list[tuple[str, str, Any]] = [
        ("GET", "/v1/models", None),
        ("POST", "/tokenize", {"prompt": "import os"}),
        ("POST", "/v1/completions", {"prompt": "x", "max_tokens": -1}),
        ("POST", "/v1/completions", {"prompt": "x", "model": "none"}),
        ("POST", "/v1/messages", {"messages": []}),
        ("GET", "/nothing?a=b", None),
        *(("POST", path, {**body_for(path, 1), "max_time": 1e-6}) for path in PATHS),
    ]
    for method, path, body in asked:
        direct, passed = (
            httpx.request(method, url + path, json=body) for url in (servers[0].url, router)
        )
        assert passed.status_code == direct.status_code
        if path != "/v1/models":
            assert passed.json() == direct.json()
        assert (passed.status_code == 408) == ("max_time" in (body or {})), passed.text
    asked_id = {"prompt": "x", "max_tokens": 1, "request_id": "order-42"}
    assert httpx.post(f"{router}/v1/completions", json=asked_id).json()["id"] == "cmpl-order-42"
    given = httpx.get(f"{router}/v1/models", headers={"X-Request-Id": "of-the-client"})
    assert given.headers["x-request-id"] == "of-the-client"


def test_hosts_are_checked_as_by_a_server(router: str, servers: list[Server]) -> None:
    """The router writes its own Host header, so a server cannot check those of clients."""
    for url in (servers[0].url, router):
        told = httpx.post(f"{url}/v1/completions", headers={"Host": "page.example"})
        assert told.status_code == 403
        assert told.json()["error"]["code"] == "host_not_allowed"


def test_a_client_cannot_choose_ids(router: str, servers: list[Server]) -> None:
    """A server refuses them, and the router does not pass them on."""
    told = {"X-Ropewalk-Answer": f"{'a' * 32} 1 1"}
    body = {"prompt": "import", "max_tokens": 2}
    for key in ({}, {"X-Ropewalk-Router-Key": "another key of a router"}):
        refused = httpx.post(f"{servers[0].url}/v1/completions", json=body, headers={**told, **key})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "router_not_trusted"
    passed = httpx.post(f"{router}/v1/completions", json=body, headers=told).json()
    assert passed["id"] != f"cmpl-{'a' * 32}"
    key = {"X-Ropewalk-Router-Key": KEY}
    answers = [
        httpx.post(
            f"{servers[0].url}/v1/completions",
            json={**body, "n": 3, "temperature": 1.0},
            headers={**told, **key},
        ).json()
        for _ in range(2)
    ]
    assert answers[0]["id"] == f"cmpl-{'a' * 32}"
    assert answers[0]["created"] == 1
    assert answers[0]["choices"] == answers[1]["choices"]
    assert len({each["text"] for each in answers[0]["choices"]}) == 3


def test_streams_go_on_when_their_server_stops(hasty_router: str, servers: list[Server]) -> None:
    """One server is stopped in mid-answer (SIGSTOP); both APIs of each kind lose nothing."""
    asked = [(path, body_for(path, 5)) for path in PATHS]
    expected = alone(servers[0], asked)
    before = metric(hasty_router, 'continued_total{outcome="ok"}')
    with slowed(*(each.pid for each in servers)):
        readers = begun(hasty_router, asked)
        os.kill(servers[1].pid, signal.SIGSTOP)
    try:
        for each in readers:
            each.join(60)
    finally:
        os.kill(servers[1].pid, signal.SIGCONT)
    for each, wanted in zip(readers, expected, strict=True):
        assert events(each.data) == wanted
    assert metric(hasty_router, 'continued_total{outcome="ok"}') > before
    wait_until(lambda: metric(hasty_router, 'servers{state="ready"}') == 2)


@contextmanager
def slow(server: Server) -> Iterator[None]:
    """A server that runs for a tenth of the time, a fraction of a second each."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            os.kill(server.pid, signal.SIGSTOP)
            time.sleep(0.27)
            os.kill(server.pid, signal.SIGCONT)
            time.sleep(0.03)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_slow_server_keeps_its_streams(router: str, servers: list[Server]) -> None:
    """It is heard within `silence_seconds`, so it is not lost, and no stream is sent again."""
    asked = [(path, body_for(path, 6, 40)) for path in PATHS]
    expected = alone(servers[0], asked)
    names = [f'retries_total{{kind="{kind}"}}' for kind in ("retry", "continuation")]
    before = [metric(router, each) for each in names]
    num_read = total(samples_of(servers[1]), "ropewalk_prompt_tokens_total")
    with slow(servers[1]):
        readers = begun(router, asked * 2)
        for each in readers:
            each.join(120)
    for each, wanted in zip(readers, expected * 2, strict=True):
        assert events(each.data) == wanted
    assert [metric(router, each) for each in names] == before
    num_then = total(samples_of(servers[1]), "ropewalk_prompt_tokens_total")
    assert num_then > num_read, "it had some of the streams"


def test_streams_wait_while_all_servers_are_lost(hasty_router: str, servers: list[Server]) -> None:
    """Both are stopped for longer than the silence that is allowed."""
    asked = [(path, body_for(path, 7)) for path in PATHS]
    expected = alone(servers[0], asked)
    with slowed(*(each.pid for each in servers)):
        readers = begun(hasty_router, asked)
        for server in servers:
            os.kill(server.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: metric(hasty_router, 'servers{state="ready"}') == 0)
        assert httpx.get(f"{hasty_router}/ready").status_code == 503
        assert httpx.get(f"{hasty_router}/live").status_code == 200
    finally:
        for server in servers:
            os.kill(server.pid, signal.SIGCONT)
    for each, wanted in zip(readers, expected, strict=True):
        each.join(60)
        assert events(each.data) == wanted


def test_streams_and_whole_answers_survive_a_killed_server(servers: list[Server]) -> None:
    """A server ends by SIGKILL under streams without a seed, and under answers that are whole."""
    with serving() as victim, routed(servers[0].url, victim.url, num_ready=2) as url:
        asked = [(path, body_for(path, number)) for number in range(2) for path in PATHS[:2]]
        expected = alone(servers[0], asked)
        unseeded = {**body_for(PATHS[0], 1), "seed": None, "n": 2}
        with ThreadPoolExecutor(4) as pool, slowed(servers[0].pid, victim.pid):
            readers = begun(url, [*asked, *[(PATHS[0], unseeded)] * 2])
            num_running = running(victim) + running(servers[0])
            whole = [
                pool.submit(httpx.post, url + path, json={**body, "stream": False}, timeout=60)
                for path, body in asked
            ]
            wait_until(lambda: running(victim) + running(servers[0]) == num_running + len(whole))
            os.kill(victim.pid, signal.SIGKILL)
        for each in readers:
            each.join(60)
        for answer in whole:
            assert answer.result().status_code == 200
        for each, wanted in zip(readers, expected, strict=False):
            assert events(each.data) == wanted
        for each in readers[len(expected) :]:
            told = [json.loads(part[6:]) for part in each.data.split(b"\n\n") if b'"id"' in part]
            assert len({part["id"] for part in told}) == 1
            ends = [part["choices"][0]["finish_reason"] for part in told if part["choices"]]
            assert ends.count("length") == 2
            assert each.data.endswith(b"data: [DONE]\n\n")
        assert metric(url, 'retries_total{kind="continuation"}') > 0
        assert metric(url, 'continued_total{outcome="diverged"}') == 0


@contextmanager
def beside(server: Server, *flags: str) -> Iterator[tuple[str, OtherServer]]:
    """A router over a real server and another one, which says that it serves the same."""
    with other_server() as other:
        key = {"X-Ropewalk-Router-Key": KEY}
        other.models = httpx.get(f"{server.url}/v1/models", headers=key).json()
        flags = (*ROUTER, "--routing", "round_robin", *flags)
        with routed(other.url, server.url, flags=flags, num_ready=2) as url:
            yield url, other


def test_other_bytes_end_a_stream_with_an_error(servers: list[Server]) -> None:
    """A client gets the other server's text and an error, and no text of the second server."""
    first = b'data: {"text": "a text that no model gives"}\n\n'
    with beside(servers[0]) as (url, other):
        other.parts = [b": open\n\n", first]
        for path, code in (
            ("/v1/completions", b'"code": "diverged"'),
            ("/v1/messages", b'"type": "api_error"'),
            ("/v1/responses", b'"code": "diverged"'),
        ):
            asked = other.num_asked
            while other.num_asked == asked:  # the servers take turns
                got = httpx.post(url + path, json=body_for(path, 3), timeout=60).content
            assert got.startswith(b": open\n\n" + first)
            rest = got[len(b": open\n\n" + first) :]
            assert code in rest
            assert rest.count(b"data: ") == (2 if path == "/v1/completions" else 1)
            wait_until(lambda: metric(url, 'servers{state="ready"}') == 2)


def test_without_a_key_of_the_router_a_lost_stream_ends_with_an_error() -> None:
    first = b'data: {"text": "a"}\n\n'
    with other_server() as other:
        other.parts = [first]
        flags = ("--check-seconds", "0.1")
        with routed(other.url, flags=flags, num_ready=1) as url:
            got = httpx.post(f"{url}/v1/completions", json={"stream": True}, timeout=60).content
    assert got.startswith(first)
    assert b'"code": "server_lost"' in got
    assert got.endswith(b"data: [DONE]\n\n")


def test_a_stream_does_not_wait_for_busy_servers_for_ever() -> None:
    """Its server is lost, and answers 429 from then on."""
    first = b'data: {"text": "a"}\n\n'
    with other_server() as other:
        other.parts, other.status_afterwards = [first], 429
        with routed(other.url, flags=(*ROUTER, "--wait-seconds", "1.5"), num_ready=1) as url:
            got = httpx.post(f"{url}/v1/completions", json={"stream": True}, timeout=60).content
    assert got.startswith(first)
    assert b'"code": "no_server"' in got
    assert other.num_asked > 1


def test_a_server_that_is_full_stays_chosen() -> None:
    """It is well, so its pages and its load are still known."""
    with other_server() as other:
        other.status, other.code = 503, "bodies_full"
        with routed(other.url, num_ready=1) as url:
            for _ in range(3):
                told = httpx.post(f"{url}/v1/completions", json={}, timeout=60)
                assert told.json()["error"]["code"] == "bodies_full"
                assert metric(url, 'servers{state="ready"}') == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_passed_by(status: int, servers: list[Server]) -> None:
    """A request goes on to the other one; without another one the client gets the refusal."""
    body = {"prompt": "import", "max_tokens": 2}
    with beside(servers[0]) as (url, other):
        other.status = status
        for _ in range(4):
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        assert other.num_asked
        with routed(other.url, num_ready=1) as alone_url:
            told = httpx.post(f"{alone_url}/v1/completions", json=body, timeout=60)
            assert (told.status_code, told.headers["retry-after"]) == (status, "1")


def test_a_mistake_is_not_sent_again(servers: list[Server]) -> None:
    with beside(servers[0]) as (url, other):
        other.status = 400
        answers = [
            httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60)
            for _ in range(4)
        ]
        refused = [each for each in answers if each.status_code == 400]
        assert len(refused) == other.num_asked > 0
