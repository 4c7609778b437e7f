"""Two real servers behind a real nginx with docker/nginx.conf."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from ropewalk.server.settings.load import ServeSettings, load_settings
from ropewalk.server.startup.gate import body_limits_of
from tests.docker.files import DOCKER
from tests.docker.real_nginx import Nginx, binary, running_nginx
from tests.doubles.waiting import wait_until
from tests.servers.paced import MODULE, slowed
from tests.servers.processes import Server, running_server
from tests.servers.programs import free_port

LIMIT_S = 60


@dataclass(frozen=True)
class Balanced:
    """An nginx and the servers behind it."""

    nginx: Nginx
    servers: tuple[Server, Server]


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    """Two servers that outlive the tests."""
    binary()  # skip before a server is started
    folder = tmp_path_factory.mktemp("nginx")
    with ExitStack() as stack:
        first, second = (stack.enter_context(running_server()) for _ in range(2))
        nginx = stack.enter_context(running_nginx(folder, first.url, second.url))
        yield Balanced(nginx, (first, second))


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request of so many tokens."""
    return {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, **fields}


def total(metric: str, *servers: Server) -> int:
    """The sum of a metric's series on the servers' own pages; its name may have labels."""
    pages = "\n".join(httpx.get(f"{each.url}/metrics").text for each in servers)
    return sum(int(float(each)) for each in re.findall(rf"^{metric}\S* (\S+)", pages, re.MULTILINE))


def num_running(*servers: Server) -> int:
    """The number of requests that the servers compute."""
    return total("ropewalk_requests_running", *servers)


def whole(nginx: Nginx, max_tokens: int) -> int:
    """The status of a request without a stream."""
    url = f"{nginx.url}/v1/completions"
    return httpx.post(url, json=body(max_tokens), timeout=LIMIT_S).status_code


def streamed(nginx: Nginx, max_tokens: int) -> str:
    """How a stream ended: `complete`, `broken`, or a refusal's status."""
    wanted = body(max_tokens, stream=True)
    url = f"{nginx.url}/v1/completions"
    try:
        with httpx.stream("POST", url, json=wanted, timeout=LIMIT_S) as answer:
            text = answer.read().decode()
    except httpx.RemoteProtocolError:
        return "broken"
    if answer.status_code != 200:
        return f"{answer.status_code}"
    is_whole = '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n")
    return "complete" if is_whole else f"ends with {text[-200:]}"


def test_every_event_comes_at_once(balanced: Balanced) -> None:
    """The first one comes while the server computes, and no block of 4 KiB is waited for."""
    wanted, url = body(1500, stream=True), f"{balanced.nginx.url}/v1/completions"
    with httpx.stream("POST", url, json=wanted, timeout=LIMIT_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces = answer.iter_raw()
        while b"data:" not in next(pieces):
            pass
        assert num_running(*balanced.servers) == 1
        counts = [piece.count(b"data:") for piece in pieces]
    assert sum(counts) >= 1000
    assert sum(counts) < 10 * len(counts)  # a block holds about 20; a late client reads several


def test_a_client_that_leaves_ends_its_request(balanced: Balanced) -> None:
    """nginx closes its own connection, too."""
    aborted = r'ropewalk_requests_total\{\S*finish_reason="abort"'
    before = total(aborted, *balanced.servers)
    wanted, url = body(1900, stream=True), f"{balanced.nginx.url}/v1/completions"
    with httpx.stream("POST", url, json=wanted, timeout=LIMIT_S) as answer:
        pieces = answer.iter_raw()
        while b"data:" not in next(pieces):
            pass
    wait_until(lambda: total(aborted, *balanced.servers) == before + 1, "aborted")


def test_the_request_id_is_the_clients_or_nginxs(balanced: Balanced) -> None:
    """It is in the answer, in the server's access log, and in nginx's."""
    url = f"{balanced.nginx.url}/v1/completions"
    given = httpx.post(url, json=body(1), headers={"X-Request-Id": "of-the-client"})
    drawn = httpx.post(url, json=body(1)).headers["x-request-id"]
    assert given.headers["x-request-id"] == "of-the-client"
    assert re.fullmatch("[0-9a-f]{32}", drawn)

    def are_logged() -> bool:
        # nginx writes its line after the client has its answer.
        of_nginx = (balanced.nginx.folder / "access.log").read_text()
        of_servers = "".join(line for each in balanced.servers for line in each.log)
        return all("of-the-client" in log and drawn in log for log in (of_nginx, of_servers))

    wait_until(are_logged, "logged", 5)


def test_refusals_are_the_servers_and_their_metrics_are_not_mixed(balanced: Balanced) -> None:
    """A body above the server's limit is below nginx's, and is a prompt beyond the context."""
    url = balanced.nginx.url
    large = httpx.post(f"{url}/v1/completions", content=b"x" * (9 * 2**20), timeout=LIMIT_S)
    assert large.json()["error"]["code"] == "context_length_exceeded"
    unknown = httpx.post(f"{url}/v1/completions", json={"unknown": 1})
    assert unknown.status_code == 400
    assert "unknown" in unknown.json()["error"]["message"]
    assert httpx.get(f"{url}/metrics").status_code == 404
    assert httpx.get(f"{url}/ready").status_code == 200


def test_without_any_server_the_answer_is_an_error_that_clients_can_read(tmp_path: Path) -> None:
    """OpenAI's clients wait for Retry-After, and try again."""
    gone = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with running_nginx(tmp_path, *gone) as nginx:
        for _ in range(2):  # at the second request, both are known to be away
            answer = httpx.post(f"{nginx.url}/v1/completions", json=body(1))
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_server"
            assert answer.headers["retry-after"] == "1"
            assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


@dataclass
class Load:
    """Clients that send one request after the other until they are stopped."""

    nginx: Nginx
    num_answered: int = 0
    failed: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def send(self) -> None:
        """Send streams and whole answers in turn."""
        while not self.stop.is_set():
            status = whole(self.nginx, 20)
            if status != 200:
                self.failed.append(f"whole: {status}")
            end = streamed(self.nginx, 20)
            if end != "complete":
                self.failed.append(f"stream: {end}")
            self.num_answered += 2


def test_a_server_that_is_drained_loses_no_request(balanced: Balanced, tmp_path: Path) -> None:
    """Its streams end there, its refusals are answered by the other, and then it is gone."""
    other = balanced.servers[1]
    with ExitStack() as stack:
        ending = stack.enter_context(
            running_server("--shutdown-timeout-seconds", str(LIMIT_S), module=MODULE)
        )
        nginx = stack.enter_context(running_nginx(tmp_path, ending.url, other.url))
        pool = stack.enter_context(ThreadPoolExecutor(8))
        load = Load(nginx)
        stack.callback(load.stop.set)
        with slowed(ending.pid):
            streams = [pool.submit(streamed, nginx, 150) for _ in range(4)]
            wait_until(lambda: num_running(ending) > 0, "running")
            clients = [pool.submit(load.send) for _ in range(4)]
            wait_until(lambda: load.num_answered >= 16, "under load")
            os.kill(ending.pid, signal.SIGTERM)
            wait_until(lambda: any("event=shutdown" in line for line in ending.log), "ends")
        wait_until(lambda: any("event=ended" in line for line in ending.log), "ended", LIMIT_S)
        so_far = load.num_answered
        wait_until(lambda: load.num_answered >= so_far + 16, "served by the other")
        load.stop.set()
        for client in clients:
            client.result(LIMIT_S)
        assert [each.result(LIMIT_S) for each in streams] == ["complete"] * 4
    assert not load.failed
    assert "503, 200" in nginx.tried(), "no refusal was met"


@pytest.mark.long
def test_a_server_that_is_killed_costs_only_its_open_streams(
    balanced: Balanced, tmp_path: Path
) -> None:
    """Answers that have not begun are computed again; new requests go to the other."""
    other = balanced.servers[0]
    with ExitStack() as stack:
        killed = stack.enter_context(running_server())
        nginx = stack.enter_context(running_nginx(tmp_path, killed.url, other.url))
        pool = stack.enter_context(ThreadPoolExecutor(8))
        streams = [pool.submit(streamed, nginx, 1900) for _ in range(2)]
        wait_until(lambda: num_running(killed) == num_running(other) == 1, "one on each")
        answers: list[Future[int]] = [pool.submit(whole, nginx, 1500) for _ in range(4)]
        wait_until(lambda: num_running(killed) >= 2, "answers among them")
        os.kill(killed.pid, signal.SIGKILL)
        assert [each.result(LIMIT_S) for each in answers] == [200] * 4
        assert sorted(each.result(LIMIT_S) for each in streams) == ["broken", "complete"]
        assert [whole(nginx, 5) for _ in range(8)] == [200] * 8
    assert "502, 200" in nginx.tried()


def test_timeouts_are_above_those_of_the_servers() -> None:
    """nginx closes idle connections first, and no live stream."""
    text = (DOCKER / "nginx.conf").read_text()
    fields = ServeSettings.model_fields
    (read,) = re.findall(r"proxy_read_timeout (\d+)h;", text)
    assert int(read) * 3600 > 2 * fields["sse_keep_alive_seconds"].default
    (idle,) = re.findall(r"keepalive_timeout (\d+)s;", text)
    assert int(idle) < 5, "uvicorn's own timeout_keep_alive"
    (size,) = re.findall(r"client_max_body_size (\d+)m;", text)
    assert int(size) * 2**20 > body_limits_of(load_settings({}), 2**20).max_bytes
