"""Position methods over HTTP: deployments, requests, answers and metrics."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.api.asking import asked, refused
from tests.server.api.test_completions import needle_prompt
from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server, running_server

_METHODS = {"rerope": {"window": 64}, "self_extend": {"window": 64, "group": 16}}
_METHODS |= {"dual_chunk": {"chunk_size": 192, "local_size": 64}}


def _entry(name: str, **positions: Any) -> dict[str, Any]:
    block = {"rope_type": "default", "positions": {"method": name, **positions}}
    return {"name": name, "rope_scaling": block, "max_model_len": 1024}


@pytest.fixture(scope="module")
def placed() -> Iterator[Server]:
    """The embedded model under a name for each method, and under yarn with an allowed method."""
    entries = [_entry(name, **parameters) for name, parameters in _METHODS.items()]
    entries.append({"name": "yarn", "allowed_positions": ["rerope"]})
    with running_server(
        "--deployments", json.dumps(entries), "--kv-cache-tokens", "8192"
    ) as server:
        yield server


def complete(server: Server, **body: Any) -> Any:
    """A greedy completion."""
    return asked(server, "completions", temperature=0, max_tokens=8, **body)


@pytest.mark.parametrize("name", _METHODS)
def test_an_answer_reports_the_method_which_may_be_sent_back(placed: Server, name: str) -> None:
    """Beyond L the answer has the method and its parameters, and within L none."""
    prompt = needle_prompt(placed, 900)
    answer = complete(placed, model=name, prompt=prompt)
    rope = answer["choices"][0]["rope"]
    assert (rope["rope_type"], rope["factor"], rope["policy"]) == ("default", 1.0, "by_position")
    positions = rope["positions"]
    assert positions.pop("temperature_factor", 1.0) == 1.0
    assert positions == {"method": name, **_METHODS[name]}
    again = complete(placed, model=name, prompt=prompt, rope=rope)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    short = complete(placed, model=name, prompt=prompt[:100])["choices"][0]
    assert "positions" not in short["rope"]


def test_a_request_names_an_allowed_method_or_gets_400(placed: Server) -> None:
    """The parameters are the server's; both numbers are in the refusal."""
    prompt = needle_prompt(placed, 500)
    answer = complete(placed, model="yarn", prompt=prompt, rope={"positions": {"method": "rerope"}})
    assert answer["choices"][0]["rope"]["positions"] == {"method": "rerope", "window": 128}
    rope = {"positions": {"method": "rerope", "window": 32}}
    error = refused(placed, "completions", model="yarn", prompt=prompt, max_tokens=8, rope=rope)
    assert error["param"] == "rope.positions.window"
    assert "must be 128, as the server has it. Given: 32" in error["message"]


def test_models_and_metrics_name_the_method(placed: Server) -> None:
    """A tier has it, and the label of a request's scaling."""
    complete(placed, model="rerope", prompt=[7] * 300)
    about = httpx.get(f"{placed.url}/v1/models/rerope").json()["ropewalk"]
    assert "positions" not in about["tiers"][0]
    assert about["tiers"][1]["positions"] == {"method": "rerope", "window": 64}
    assert about["allowed_positions"] == ["native", "rerope"]
    assert "allowed_positions" in httpx.get(f"{placed.url}/v1/models/yarn").json()["ropewalk"]
    ended = {"model_name": "rerope", "finish_reason": "length"}
    applied = {"rope_type": "default+rerope", "factor": "1"}
    assert total(samples_of(placed), "ropewalk_requests_total", **ended, **applied) > 0
    assert "positions      rerope, window 64" in placed.banner
