"""Position methods over HTTP: deployments, requests, answers and metrics."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server, run_here, running_server

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


def complete(server: Server, **body: Any) -> httpx.Response:
    """A greedy completion."""
    body = {"temperature": 0, "max_tokens": 8, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def needle(server: Server, num_tokens: int) -> list[int]:
    """A definition, library code and the question, in tokens."""

    def tokens_of(text: str) -> list[int]:
        answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text})
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    filling = tokens_of(Path(os.__file__).read_text())[1:]
    first, last = tokens_of("PORT_4821 = 93175\n"), tokens_of("\nprint(PORT_4821)  # -> ")[1:]
    return first + filling[: num_tokens - len(first) - len(last)] + last


@pytest.mark.parametrize("name", _METHODS)
def test_an_answer_reports_the_method_which_may_be_sent_back(placed: Server, name: str) -> None:
    """Beyond L the answer has the method and its parameters, and within L none."""
    prompt = needle(placed, 900)
    answer = complete(placed, model=name, prompt=prompt).json()
    rope = answer["choices"][0]["rope"]
    assert (rope["rope_type"], rope["factor"], rope["policy"]) == ("default", 1.0, "by_position")
    positions = rope["positions"]
    assert positions.pop("temperature_factor", 1.0) == 1.0
    assert positions == {"method": name, **_METHODS[name]}
    again = complete(placed, model=name, prompt=prompt, rope=rope).json()
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    short = complete(placed, model=name, prompt=prompt[:100]).json()["choices"][0]
    assert "positions" not in short["rope"]


def test_a_request_names_an_allowed_method_or_gets_400(placed: Server) -> None:
    """The parameters are the server's; both numbers are in the refusal."""
    prompt = needle(placed, 500)
    answer = complete(placed, model="yarn", prompt=prompt, rope={"positions": {"method": "rerope"}})
    assert answer.json()["choices"][0]["rope"]["positions"] == {"method": "rerope", "window": 128}
    asked = {"positions": {"method": "rerope", "window": 32}}
    refused = complete(placed, model="yarn", prompt=prompt, rope=asked)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "rope.positions.window")
    assert "must be 128, as the server has it. Given: 32" in error["message"]
    refused = complete(placed, model="yarn", prompt=prompt, rope={"positions": {"method": "sinks"}})
    assert refused.status_code == 400
    assert "must be one of rerope (allowed_positions)" in refused.json()["error"]["message"]


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


def test_a_bad_parameter_ends_the_command_with_both_numbers(tmp_path: Path) -> None:
    """Exit code 2 and one sentence, before anything is loaded."""
    block = {"positions": {"method": "dual_chunk", "chunk_size": 192, "local_size": 32}}
    file = tmp_path / "ropewalk.yaml"
    file.write_text(json.dumps({"rope_scaling": block}))
    ended = run_here("config", "check", str(file))
    assert ended.returncode == 2
    assert (
        "rope_scaling: positions.chunk_size: minus local_size is 160, which must be a multiple of "
        "the page size (64)"
    ) in ended.stderr
