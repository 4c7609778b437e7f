"""SIGHUP reads deployments, keys and bounds again, while requests run."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.server.settings.load import SettingsError
from ropewalk.server.startup.planning.planned_deployments import num_profiles
from ropewalk.server.startup.reload import check_released_pages, check_table_room
from tests.doubles.engines import deployment_of
from tests.server.load.soak_watch import wait_for
from tests.servers.paced import MODULE, slowed
from tests.servers.processes import Server, running_server

CACHE = "kv_cache_tokens: 16384\n"
TWO = """deployments:
  - {name: demo}
  - {name: static, rope_policy: fixed, rope_scaling: {rope_type: yarn, factor: 8.0}}
"""
OTHER = """deployments:
  - {name: demo}
  - {name: turned, rope_policy: fixed, rope_scaling: {rope_type: ntk, factor: 8.0}}
"""


class Reloading:
    """A server whose file and keys a test rewrites."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def hang_up(self, settings: str) -> str:
        """Write the file, send SIGHUP, and return what the log says of it."""
        (self.folder / "a.yaml").write_text(self.head() + settings)
        first = len(self.server.log)
        os.kill(self.server.pid, signal.SIGHUP)
        ends = ("event=reloaded", "event=reload_refused")
        assert wait_for(lambda: any(end in "".join(self.server.log[first:]) for end in ends))
        return "".join(line for line in self.server.log[first:] if "reload" in line)

    def head(self) -> str:
        """The settings that stay."""
        return f"{CACHE}api_key_file: {self.folder / 'keys'}\n"

    def num_running(self) -> int:
        """How many requests run now."""
        head = {"Authorization": "Bearer secret-a"}
        text = httpx.get(f"{self.server.url}/metrics", headers=head, timeout=30).text
        return int(text.split("\nropewalk_requests_running ")[1].split(".")[0])

    def post(self, key: str = "secret-a", **body: Any) -> httpx.Response:
        """Complete a prompt."""
        return httpx.post(
            f"{self.server.url}/v1/completions",
            json={"prompt": "a", "max_tokens": 2, "temperature": 0, **body},
            headers={"Authorization": f"Bearer {key}"},
            timeout=120,
        )


KEYS = "alice:secret-a\nbob:secret-b\n"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloading]:
    """A server with two deployments and two keys."""
    folder = tmp_path_factory.mktemp("reload")
    (folder / "keys").write_text(KEYS)
    (folder / "a.yaml").write_text(f"{CACHE}api_key_file: {folder / 'keys'}\n{TWO}")
    with running_server("--config", str(folder / "a.yaml"), module=MODULE) as running:
        yield Reloading(running, folder)


@pytest.fixture
def reloading(started: Reloading) -> Reloading:
    """The server with its first settings in force again."""
    (started.folder / "keys").write_text(KEYS)
    assert "event=reloaded" in started.hang_up(TWO)
    return started


def test_running_requests_end_on_the_deployment_they_began_with(reloading: Reloading) -> None:
    """New requests for a removed name get 404; a new name has a rotation table of its own."""
    long: dict[str, Any] = {"model": "static", "max_tokens": 100, "ignore_eos": True}
    long |= {"temperature": 2, "seed": 1}  # drafts would end it before the reload
    alone = reloading.post(**long).json()["choices"][0]
    with ThreadPoolExecutor(4) as pool:
        with slowed(reloading.server.pid):
            asked = [pool.submit(reloading.post, **long) for _ in range(4)]
            assert wait_for(lambda: reloading.num_running() == 4)
            told = reloading.hang_up(OTHER)
            assert reloading.num_running() == 4, "no reload came in the middle"
        found = [each.result() for each in asked]
    assert "added=turned" in told
    assert "removed=static" in told
    assert reloading.post(model="static").json()["error"]["code"] == "model_not_found"
    turned = reloading.post(model="turned").json()["choices"][0]["rope"]
    assert (turned["rope_type"], turned["factor"]) == ("ntk", 8.0)
    assert [answer.status_code for answer in found] == [200] * 4
    assert {answer.json()["choices"][0]["text"] for answer in found} == {alone["text"]}
    assert {answer.json()["model"] for answer in found} == {"static"}


def test_no_request_fails_under_a_load_with_reloads(reloading: Reloading) -> None:
    """The file changes back and forth while six clients ask for the name that stays."""
    statuses: list[int] = []
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set():
            statuses.append(reloading.post(model="demo", max_tokens=6).status_code)

    threads = [threading.Thread(target=load) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        for number in range(8):
            assert "event=reloaded" in reloading.hang_up(OTHER if number % 2 == 0 else TWO)
            assert wait_for(lambda: len(statuses) > 3 * number, limit_s=60)  # noqa: B023
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(statuses) > 20
    assert set(statuses) == {200}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("deployments:\n  - {name: demo, rope_polcy: fixed}\n", "Did you mean `rope_policy`?"),
        (
            "deployments:\n  - {name: demo, rope_scaling: {rope_type: yarn, factor: 16.0}}\n",
            "the longest context is 4096 tokens, but the server was started for 2048",
        ),
        ("keys: [{name: carol, max_running: 1}]\n", "keys: carol has no key"),
        ("deployments: [\n", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_as_at_start_and_changes_nothing(
    reloading: Reloading, settings: str, problem: str
) -> None:
    """The other, good part of the file does not come into force either."""
    (reloading.folder / "keys").write_text("alice:other\nbob:secret-b\n")
    told = reloading.hang_up(settings)
    assert "event=reload_refused" in told
    assert problem in told
    assert reloading.post(model="static").status_code == 200
    assert reloading.post(key="other").status_code == 401
    assert "event=reloaded" in reloading.hang_up(TWO)
    assert reloading.post(key="other").status_code == 200
    assert reloading.post().status_code == 401


def test_settings_that_cannot_change_are_named(reloading: Reloading) -> None:
    """Settings that can change are in force all the same."""
    told = reloading.hang_up(f"{OTHER}dtype: bfloat16\nmax_num_seqs: 4\n")
    assert 'event=reload_ignored settings="dtype, max_num_seqs"' in told
    assert "added=turned" in told
    assert "reload_ignored" not in reloading.hang_up(TWO)


def test_bounds_and_keys_come_into_force(reloading: Reloading) -> None:
    """To take all keys away would open the server, and needs a restart."""
    assert reloading.post(n=3).status_code == 200
    reloading.hang_up(f"{TWO}keys: [{{name: alice, max_running: 2}}]\n")
    assert reloading.post(n=3).json()["error"]["code"] == "too_many_answers"
    (reloading.folder / "keys").write_text("carol:secret-c\n")
    assert "keys=1" in reloading.hang_up(TWO)
    assert reloading.post(key="secret-c").status_code == 200
    assert reloading.post(key="secret-b").status_code == 401
    (reloading.folder / "a.yaml").write_text(CACHE)
    first = len(reloading.server.log)
    os.kill(reloading.server.pid, signal.SIGHUP)
    assert wait_for(lambda: "was started with keys" in "".join(reloading.server.log[first:]))
    assert reloading.post(key="none").status_code == 401


def test_a_gpu_refuses_more_rotation_tables_than_it_has_room_for(
    embedded: Checkpoint,
) -> None:
    """A CPU makes more room at the first request; the sentence names both numbers."""
    scaling = {"rope_type": "yarn", "factor": 4.0}
    before = deployment_of(embedded)
    after = deployment_of(embedded, rope_scaling=scaling)
    needed = num_profiles([before, after])
    room = needed - 1
    check_table_room([before, after], needed, is_on_gpu=True)
    check_table_room([before, after], room, is_on_gpu=False)
    with pytest.raises(SettingsError, match=f"need {needed} rotation tables.* room for {room} "):
        check_table_room([before, after], room, is_on_gpu=True)


def test_sinks_come_with_a_start_only(llama_checkpoint: Checkpoint) -> None:
    """The start checks that no layer reads the pages that are released."""
    block = {"rope_type": "default", "positions": {"method": "sinks"}}
    plain, sinks = (
        deployment_of(llama_checkpoint),
        deployment_of(llama_checkpoint, rope_scaling=block),
    )
    check_released_pages([sinks, plain], [sinks])
    check_released_pages([plain], [plain])
    with pytest.raises(SettingsError, match="positions sinks was in no deployment at the start"):
        check_released_pages([sinks], [plain])
