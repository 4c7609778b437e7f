"""Several served names over one set of weights and one cache."""

import json.decoder
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.api.asking import asked, refused, tokens_of
from tests.servers.metrics import samples_of
from tests.servers.processes import Server, run_here, running_server

FILE = """
deployments:
  - name: demo
    exact_rope_factors: [1.3]
  - name: demo-static-8x
    rope_scaling: {rope_type: yarn, factor: 8.0}
    rope_policy: fixed
    max_rope_factor: 2
  - name: demo-static-1.3x
    rope_scaling: {rope_type: yarn, factor: 1.3}
    rope_policy: fixed
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model under two names, and a third one with an odd factor."""
    path = tmp_path_factory.mktemp("config") / "ropewalk.yaml"
    path.write_text(FILE)
    with running_server("--config", str(path)) as running:
        yield running


def post(server: Server, model: str, **body: Any) -> dict[str, Any]:
    """Send one greedy completion."""
    found: dict[str, Any] = asked(server, "completions", model=model, temperature=0, **body)
    return found


def short_prompts(server: Server) -> list[list[int]]:
    """Library code, 200 tokens each: within the trained 256."""
    ids = tokens_of(server, Path(json.decoder.__file__).read_text())
    return [ids[at : at + 200] for at in range(1, 1801, 200)]


def prompt_logprobs(server: Server, model: str, prompt: list[int], **more: Any) -> list[float]:
    """The logprob of every token of the prompt but the first."""
    answer = post(server, model, prompt=prompt, max_tokens=0, echo=True, logprobs=0, **more)
    found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
    return found


def test_both_are_listed_and_say_what_they_apply(two: Server) -> None:
    """The `rope` object of an answer states the type, the factor and the policy."""
    listed = httpx.get(f"{two.url}/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["demo", "demo-static-8x", "demo-static-1.3x"]
    assert "deployment       demo-static-8x" in two.banner
    own = post(two, "demo", prompt="a", max_tokens=1)["choices"][0]["rope"]
    static = post(two, "demo-static-8x", prompt="a", max_tokens=1)["choices"][0]["rope"]
    assert (own["rope_type"], own["factor"], own["policy"]) == ("default", 1.0, "by_position")
    assert (static["rope_type"], static["factor"], static["policy"]) == ("yarn", 8.0, "fixed")


@pytest.mark.parametrize("num_tokens", [100, 300])
def test_an_exact_factor_is_that_of_the_table_at_every_length(two: Server, num_tokens: int) -> None:
    """Without `exact` it is raised to a tier; with it, the bits are those of a static table."""
    prompt = [*short_prompts(two)[0], *short_prompts(two)[1]][:num_tokens]
    raised = post(two, "demo", prompt=prompt, max_tokens=1, rope={"factor": 1.3})
    assert raised["choices"][0]["rope"]["factor"] == 2
    exact = {"factor": 1.3, "exact": True}
    told = post(two, "demo", prompt=prompt, max_tokens=1, rope=exact)["choices"][0]["rope"]
    assert (told["factor"], told["requested_factor"], told["exact"]) == (1.3, 1.3, True)
    again = post(two, "demo", prompt=prompt, max_tokens=1, rope=told)["choices"][0]["rope"]
    assert again == told
    found = prompt_logprobs(two, "demo", prompt, rope=exact)
    assert found == prompt_logprobs(two, "demo-static-1.3x", prompt)
    assert found != prompt_logprobs(two, "demo", prompt, rope={"factor": 1.3})


@pytest.mark.parametrize(
    ("rope", "num_tokens", "param", "message"),
    [
        ({"factor": 1.4, "exact": True}, 10, "rope.factor", "one of 1, 1.3, 2, 4, 8 with `exact`"),
        ({"exact": True}, 10, "rope.exact", "needs `factor`"),
        ({"factor": 1.3, "exact": True}, 340, "prompt", "(the requested factor 1.3)"),
    ],
)
def test_an_exact_factor_that_is_no_table_is_refused(
    two: Server, rope: dict[str, Any], num_tokens: int, param: str, message: str
) -> None:
    """The refusal lists the factors that there are; a table serves no more than it reaches."""
    body = {"model": "demo", "prompt": [5] * num_tokens, "max_tokens": 1, "rope": rope}
    error = refused(two, "completions", **body)
    assert error["param"] == param
    assert message in error["message"], error


@pytest.mark.parametrize("model", ["demo", "demo-static-8x"])
def test_a_reported_rope_object_may_be_sent_back_whole(two: Server, model: str) -> None:
    """A request with the reported object has the same tier, and false numbers are refused."""
    for words, rope in ((1200, None), (100, {"factor": 1.5})):
        messages = [{"role": "user", "content": "a " * words}]
        body = {"model": model, "messages": messages, "max_tokens": 2, "rope": rope}
        told = asked(two, "chat/completions", **body)["choices"][0]["rope"]
        body["rope"] = {**told, "ended_by": "tier"}
        again = asked(two, "chat/completions", **body)["choices"][0]["rope"]
        assert {**again, "requested_factor": told["requested_factor"]} == told
    for field, value in (("original_max_position_embeddings", 64), ("requested_factor", 9)):
        body["rope"] = {**told, field: value}
        error = refused(two, "chat/completions", **body)
        assert error["param"] == f"rope.{field}"
        assert "is only reported" in error["message"]


@pytest.mark.parametrize("policy", ["by_position", "grow", "grow-exact"])
def test_a_reported_object_finds_the_pages_of_its_prompt(two: Server, policy: str) -> None:
    """Its factor is that of the last tier, and would move the first positions as a least one."""
    prompt = [9, 8] * 200
    told = post(two, "demo", prompt=prompt, max_tokens=2, rope={"policy": policy})
    rope = told["choices"][0]["rope"]
    assert (rope["policy"], rope["factor"], rope["requested_factor"]) == (policy, 2, None)
    again = post(two, "demo", prompt=[*prompt, 7], max_tokens=2, rope=rope)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
    again = again["choices"][0]["rope"]
    assert (again["policy"], again["factor"], again["requested_factor"]) == (policy, 2, None)


def test_an_older_name_of_a_policy_is_accepted(two: Server) -> None:
    """Release 0.1 had `pinned`, and answers tell the name that it has now."""
    old, new = (
        post(two, "demo", prompt=[9, 8] * 150, max_tokens=4, rope={"policy": name})
        for name in ("pinned", "grow")
    )
    assert old["choices"] == new["choices"]
    assert old["choices"][0]["rope"]["policy"] == "grow"


def test_requests_and_their_times_are_counted_by_deployment(two: Server) -> None:
    """Only series with requests exist. /stats has the same counts for a page or a terminal."""
    bodies = {"demo": [7] * 100, "demo-static-8x": [7] * 900}
    for model, prompt in bodies.items():
        post(two, model, prompt=prompt, max_tokens=2)
    samples = samples_of(two)
    ended = {
        (each.labels["model_name"], each.labels["rope_type"], each.labels["factor"])
        for each in samples
        if each.name == "ropewalk_requests_total" and each.labels["finish_reason"] == "length"
    }
    assert {("demo", "default", "1"), ("demo-static-8x", "yarn", "8")} <= ended
    assert ("demo-static-8x", "default", "1") not in ended
    for name in (
        *("time_to_first_token", "request_queue", "request_prefill"),
        *("inter_token_latency", "e2e_request_latency"),
    ):
        counted = {
            (each.labels["model_name"], each.labels["context_bucket"]): each.value
            for each in samples
            if each.name == f"ropewalk_{name}_seconds_count"
        }
        assert counted.keys() >= {("demo", "128"), ("demo-static-8x", "1024")}
        assert all(counted.values()), "a series without an observation"
    stats = httpx.get(f"{two.url}/stats").json()
    told = stats["time_to_first_token_seconds"]
    firsts = {
        name: [each[-1] for each in model["counts"]] for name, model in told["models"].items()
    }
    assert firsts.keys() == bodies.keys()
    assert [sum(each) for each in zip(*firsts.values(), strict=True)] == [
        each[-1] for each in told["counts"]
    ]
    table = run_here("top", two.url, "--once").stdout.splitlines()
    assert set(bodies) <= {line.strip() for line in table}, "each deployment has rows of its own"
