"""Aliases of served names, and the order in which requests start by their priority."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.doubles.waiting import wait_until
from tests.server.api.asking import refused
from tests.servers.metrics import samples_of, total
from tests.servers.paced import MODULE, slowed
from tests.servers.processes import Server, run_here, running_server

FILE = """
scheduling_policy: priority
max_num_seqs: 1
model_aliases: {ALIAS: demo}
deployments:
  - name: demo
  - name: demo-static
    rope_scaling: {rope_type: yarn, factor: 8.0}
    rope_policy: fixed
"""


class Configured(NamedTuple):
    """A server, and the file that it reads again."""

    server: Server
    path: Path


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    """A server of one sequence at a time, with an alias."""
    path = tmp_path_factory.mktemp("config") / "ropewalk.yaml"
    path.write_text(FILE.replace("ALIAS", "gpt-4o"))
    with running_server("--config", str(path), module=MODULE) as running:
        yield Configured(running, path)


def post(server: Server, name: str = "", **fields: Any) -> Any:
    """Return a completion, whose request id is the name."""
    body = {"prompt": "import os", "temperature": 0, "max_tokens": 4, "logprobs": 2, **fields}
    headers = {"X-Request-Id": name} if name else {}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def gauge(server: Server, name: str) -> float:
    """Return the value of a metric without labels."""
    return total(samples_of(server), name)


def test_an_alias_is_served_by_its_deployment(configured: Configured) -> None:
    """The answer tells the deployment's name. The list of models has an entry for the alias."""
    server = configured.server
    aliased, named = (post(server, model=model) for model in ("gpt-4o", "demo"))
    assert aliased["choices"] == named["choices"]
    assert aliased["model"] == "demo"
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    names = [(each["id"], each["root"]) for each in listed]
    assert names == [("demo", "demo"), ("demo-static", "demo-static"), ("gpt-4o", "demo")]
    assert [each["ropewalk"].get("aliases") for each in listed] == [["gpt-4o"], None, ["gpt-4o"]]
    assert httpx.get(f"{server.url}/v1/models/").json()["data"] == listed
    for each in listed:
        assert httpx.get(f"{server.url}/v1/models/{each['id']}").json() == each
    body = {"prompt": "a", "model": "gpt-4o"}
    assert httpx.post(f"{server.url}/tokenize", json=body).status_code == 200
    unknown = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "model": "gpt-5"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"].endswith("Served: demo, demo-static, gpt-4o.")


def test_requests_start_by_priority_and_answer_as_alone(configured: Configured) -> None:
    """Three wait for the end of a long one; the lowest number starts first, and no bit changes."""
    server = configured.server
    alone = {name: post(server, prompt=f"def {name}", max_tokens=8) for name in "abcd"}
    first = len(server.log)
    asked = {"a": 7, "b": 0, "c": -3, "d": 7}
    with ThreadPoolExecutor(5) as pool:
        # Random tokens, because drafts would end it before the others wait.
        slow = {"max_tokens": 100, "ignore_eos": True, "temperature": 2, "seed": 1}
        found = {}
        with slowed(server.pid):
            long = pool.submit(post, server, "long", prompt="import", **slow)
            wait_until(lambda: gauge(server, "ropewalk_requests_running") == 1)
            for number, (name, priority) in enumerate(asked.items(), 1):
                fields = {"prompt": f"def {name}", "max_tokens": 8, "priority": priority}
                found[name] = pool.submit(post, server, f"order-{name}", **fields)
                wait_until(lambda: gauge(server, "ropewalk_requests_waiting") == number)  # noqa: B023
            assert not long.done(), "the long request ended before all waited"
        for name, answer in found.items():
            assert answer.result()["choices"] == alone[name]["choices"], name
        long.result()
    lines = [each for each in server.log[first:] if "order-" in each]
    wait_until(lambda: sum("order-" in each for each in server.log[first:]) == 4)
    lines = [each for each in server.log[first:] if "order-" in each]
    order = [name for each in lines for name in asked if f"order-{name}" in each]
    assert order == ["c", "b", "a", "d"]


def test_a_priority_is_refused_where_requests_start_as_they_arrive(server: Server) -> None:
    """The message names the setting, on both routes."""
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": messages}),
    ):
        error = refused(server, path, **body, priority=-5)
        assert error["param"] == "priority"
        assert "(scheduling_policy is fcfs). Given: -5" in error["message"]


def test_aliases_are_read_again(configured: Configured) -> None:
    """After SIGHUP the new alias is served, and the old one is not."""
    server, path = configured
    url = f"{server.url}/v1/models"
    # The first alias again at the end, for the tests that run after this one.
    for alias, other in (("claude", "gpt-4o"), ("gpt-4o", "claude")):
        path.write_text(FILE.replace("ALIAS", alias))
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: httpx.get(f"{url}/{alias}").status_code == 200)  # noqa: B023  # waits
        assert httpx.get(f"{url}/{other}").status_code == 404


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ("{gpt-4o: dem}", "model_aliases: 'gpt-4o' must name one of demo; got 'dem'"),
        ("{demo: demo}", "model_aliases: 'demo' is a deployment"),
    ],
)
def test_an_alias_of_nothing_or_of_itself_is_refused(
    tmp_path: Path, aliases: str, message: str
) -> None:
    """`config check` finds what `serve` would refuse."""
    path = tmp_path / "ropewalk.yaml"
    path.write_text(f"model_aliases: {aliases}\ndeployments: [{{name: demo}}]\n")
    ended = run_here("config", "check", str(path))
    assert ended.returncode == 2, ended
    assert message in ended.stderr + ended.stdout
