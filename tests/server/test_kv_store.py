"""`ropewalk serve --kv-store`: servers share the pages of a real store."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ropewalk.server.settings.load import SettingsError, load_settings
from ropewalk.server.startup import named_places
from ropewalk.server.startup.gate import checked
from ropewalk.server.startup.planning.dry_run import outlook_lines, outlook_of
from tests.doubles.waiting import wait_until
from tests.server.test_kv_disk import ask, metrics, storing_server
from tests.servers.processes import Server, without_replicas
from tests.servers.valkey_server import running_store

pytestmark = without_replicas

PASSWORD = "Secret-of-9-stores"  # noqa: S105  # of a store that this test starts


def store_server(url: str, *flags: str) -> AbstractContextManager[Server]:
    return storing_server("--kv-store", url, *flags)


def test_two_servers_share_a_store_that_dies_under_load(server: Server, tmp_path: Path) -> None:
    """A prompt computed on one is read by the other, and its death costs no answer and no bit."""
    prompts = [[(at * at + number) % 2000 for at in range(400)] for number in range(6)]
    expected = [ask(server.url, each)[0] for each in prompts]
    with running_store(tmp_path, "--requirepass", PASSWORD) as store:
        url = store.url.replace("//", f"//:{PASSWORD}@")
        with store_server(url) as first, store_server(url) as second:
            assert f"    in a store     {store.url}/0, 4 KiB a token" in first.banner
            assert ask(first.url, prompts[0]) == (expected[0], 0)
            wait_until(lambda: metrics(first.url)['pages_total{event="written"}'] >= 6)
            assert ask(second.url, prompts[0]) == (expected[0], 384)
            assert ask(second.url, prompts[0], cache_salt="other")[1] == 0
            places = [
                [each for each in metrics(url) if each.startswith("info")]
                for url in (first.url, second.url)
            ]
            assert places[0] == places[1] != []
            jobs = [(each.url, at) for at in range(1, 6) for each in (first, second)] * 3
            num_answered = itertools.count(1)

            def answered(job: tuple[str, int]) -> Any:
                found = ask(job[0], prompts[job[1]])[0]
                if next(num_answered) == 5:
                    store.kill()
                return found

            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(answered, jobs))
            told = [httpx.get(f"{each.url}/v1/models").text for each in (first, second)]
            logs = [line for each in (first, second) for line in each.log]
    assert answers == [expected[at] for _, at in jobs]
    assert not any(PASSWORD in line for line in [*told, *logs])
    assert not any("Traceback" in line for line in logs)


@pytest.mark.parametrize("text", [f"valkey://u:{PASSWORD}@kv:x", f"http://u:{PASSWORD}@kv"])
def test_no_sentence_about_an_address_holds_its_password(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it comes by a flag or a variable."""
    with pytest.raises(SettingsError) as by_flag:
        load_settings({"kv_store": text})
    monkeypatch.setenv("ROPEWALK_KV_STORE", text)
    with pytest.raises(SettingsError) as by_variable:
        load_settings({})
    for error in (by_flag, by_variable):
        assert "kv_store: must be valkey://" in str(error.value)
        assert PASSWORD not in str(error.value)


def test_the_checks_before_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing connects. The line is that of the banner."""
    flags = {"kv_store": f"valkeys://u:{PASSWORD}@kv.invalid/2"}
    settings = load_settings(flags)
    checked(settings)
    lines = outlook_lines(settings, outlook_of(settings))
    assert "    in a store     valkeys://kv.invalid:6379/2, 4 KiB a token" in lines
    absent = load_settings({"kv_store": f"valkeys://kv?ssl_ca_certs={tmp_path}/ca.pem"})
    with pytest.raises(
        SettingsError, match=r"kv_store: ssl_ca_certs must be a file, got .*ca\.pem"
    ):
        checked(absent)
    find_spec = named_places.find_spec

    def without_client(name: str) -> Any:
        return None if name == "valkey" else find_spec(name)

    monkeypatch.setattr(named_places, "find_spec", without_client)
    with pytest.raises(SettingsError, match="kv_store needs the client of Valkey: pip install"):
        checked(settings)
