"""Servers that serve something else under the same names take no requests."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.router.fleet.facts import Facts, facts_of, why_none_goes_on
from tests.doubles.waiting import wait_until
from tests.server.router.test_route import FLAGS, KEY, ROUTER, metric
from tests.servers.processes import Server, running_server, without_replicas

pytestmark = without_replicas

_SAME = ("--served-model-name", "ropewalk-demo", "--rope-scaling")
_SCALING = '{"rope_type": "yarn", "factor": 8.0}'


def copied(folder: Path, *, with_other_weight: bool) -> Path:
    """The embedded model in another folder; the last number of its weights may be another one."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= with_other_weight  # the lowest bit of an exponent
    file.write_bytes(content)
    return folder


def listing(server: Server, *, with_key: bool = True) -> dict[str, Any]:
    """What a server tells about its only model."""
    headers = {"X-Ropewalk-Router-Key": KEY} if with_key else {}
    (entry,) = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60).json()["data"]
    found: dict[str, Any] = entry
    return found


def test_other_weights_and_number_types_are_refused(tmp_path: Path) -> None:
    """Their names and listings are the same. A copy of the model elsewhere is the same model.

    The log has a line for each, with the beginnings of both fingerprints.
    """
    changed = copied(tmp_path / "changed", with_other_weight=True)
    same = copied(tmp_path / "same", with_other_weight=False)
    with (
        running_server(*FLAGS) as first,
        running_server(*FLAGS, "--model", str(same), *_SAME, _SCALING) as second,
        running_server(*FLAGS, "--model", str(changed), *_SAME, _SCALING) as other_weights,
        running_server(*FLAGS, "--dtype", "bfloat16") as other_type,
    ):
        servers = (first, second, other_weights, other_type)
        told = [listing(each) for each in servers]
        prints = [each.pop("fingerprint") for each in told]
        arithmetic = [each.pop("arithmetic") for each in told]
        for each in told:
            del each["created"], each["kv_cache"]  # of each server itself
        assert told == [told[0]] * 4
        assert prints[0] == prints[1]
        assert len(set(prints)) == 3
        assert len(set(arithmetic[:3])) == 1
        assert listing(first, with_key=False)["fingerprint"] == prints[0]
        by_name = httpx.get(f"{first.url}/v1/models/ropewalk-demo").json()
        assert by_name["fingerprint"] == prints[0]
        urls = [each.url for each in servers]
        with running_server(*urls, *ROUTER, subcommand="route") as router:
            wait_until(lambda: metric(router.url, 'servers{state="ready"}') == 2)
            wait_until(lambda: metric(router.url, 'refused_servers{reason="fingerprint"}') == 2)
            asked = {"prompt": "import", "max_tokens": 1}
            for _ in range(6):
                assert httpx.post(f"{router.url}/v1/completions", json=asked).status_code == 200
            for other in prints[2:]:  # the log is read by a thread of this process

                def is_logged(other: str = other) -> bool:
                    return any(prints[0][:8] in each and other[:8] in each for each in router.log)

                wait_until(is_logged)
            lines = [each for each in router.log if "server_refused" in each]
            assert all("weights, number types, settings or version" in each for each in lines)
            for refused in (other_weights, other_type):
                page = httpx.get(f"{refused.url}/metrics").text
                assert "ropewalk_prompt_tokens_total 0.0" in page


@pytest.mark.parametrize("has_key", [True, False])
def test_fingerprints_count_with_a_key_only(*, has_key: bool) -> None:
    """Without one, a server tells its own only after another router has asked."""
    entry = {"id": "a", "created": 1, "fingerprint": "f", "arithmetic": "x"}
    on_gpu = {"created": 2, "same_bits_in_any_batch": False}
    others = [{**entry, **on_gpu}, {**entry, "fingerprint": "g"}, {**entry, "arithmetic": "y"}]
    first, same, served, computed = (
        facts_of({"data": [each]}, has_key=has_key) for each in (entry, *others)
    )
    assert first == same
    assert (first.served == served.served) != has_key
    assert first.served == computed.served, "such a server takes requests"
    assert (first == computed) != has_key, "but no stream of the first one"


def test_a_stream_that_cannot_go_on_elsewhere_is_told_why() -> None:
    begun = Facts("a", ("f",), ("x",))
    assert "another processor" in why_none_goes_on(begun, [Facts("a", ("f",), ("y",))], [])
    others = [Facts("a", ("f",), ("y",)), begun]
    assert why_none_goes_on(begun, others, []) == "No server is ready."
    problems = ["it left", "cannot connect: call failed ('10.0.0.1', 80)", "it left"]
    told = why_none_goes_on(begun, [], problems)
    assert told == "No server is ready (2 of them: it left; cannot connect)."
