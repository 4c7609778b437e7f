"""A model with states over HTTP: deployments, logprobs, schemas, choices and drafts."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from tests import fixed_costs
from tests.checkpoints.tiny_models import tiny_config, tiny_model
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.processes import Server, running_server

ARCHITECTURE = "qwen3_5_text"
# Schemas need spaces and quotes, and the end of an answer is a zero byte.
SHAPE = {"vocab_size": 256, "eos_token_id": 188}
LETTERS = {str(token): 40.0 for token in range(64, 90)}
FILE = """
deployments:
  - name: native
  - name: yarn-4
    rope_scaling: {rope_type: yarn, factor: 4.0}
    rope_policy: fixed
"""
SCHEMA = {
    "type": "object",
    "properties": {"a_long_name": {"enum": [True, False]}, "another_name": {"const": "text"}},
    "required": ["a_long_name", "another_name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny Qwen 3.5 under two names, with drafts that do not follow the machine's load."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    tiny_model(ARCHITECTURE, **SHAPE).save_pretrained(folder)
    tokenizer = byte_tokenizer_fast()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    (folder / "serve.yaml").write_text(f"model: {folder}\n{FILE}")
    flags = ("--config", str(folder / "serve.yaml"), "--kv-cache-tokens", "8192")
    with running_server(*flags, "--dtype", "float32", module=fixed_costs.MODULE) as running:
        yield running


def completed(server: Server, **body: Any) -> dict[str, Any]:
    """The answer to one completion, greedy if `body` has no temperature."""
    sent = {"temperature": 0, "max_tokens": 20, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=sent, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompt_of(count: int, seed: int) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(188) for _ in range(count)]


def in_float64(prompt: list[int], **rope: Any) -> list[float]:
    """The logprobs of a prompt's tokens but the first by transformers, in float64."""
    parameters = {**tiny_config(ARCHITECTURE).rope_parameters, **rope}
    model = tiny_model(ARCHITECTURE, **SHAPE, rope_parameters=parameters).double()
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return [float(logits_TV[at, token]) for at, token in enumerate(prompt[1:])]


def bodies() -> list[dict[str, Any]]:
    """Requests of both deployments: with logprobs, choices, penalties, and schemas."""
    chat = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    shared = prompt_of(70, 3)
    return [
        {"model": "native", "prompt": prompt_of(20, 1), "logprobs": 3},
        {"model": "yarn-4", "prompt": [*shared, 5], "logprobs": 2, "max_tokens": 40},
        {"model": "yarn-4", "prompt": [*shared, 6], "n": 3, "temperature": 1, "seed": 4},
        {"model": "native", "prompt": [9, 9], "presence_penalty": 0.5, "logprobs": 1},
        *(
            {
                "model": name,
                "prompt": [7],
                "max_tokens": 60,
                "temperature": 1,
                "seed": 1,
                "logprobs": 1,
                "response_format": chat,
            }
            for name in ("native", "yarn-4")
        ),
    ]


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("native", {}),
        (
            "yarn-4",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_each_deployment_has_the_logprobs_of_transformers(
    hybrid: Server, name: str, rope: dict[str, Any]
) -> None:
    """Under its own table; the layers with states have none."""
    prompt = prompt_of(60, 8)
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = completed(hybrid, model=name, **body)
    found = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert found == pytest.approx(in_float64(prompt, **rope), abs=2e-4)


def test_requests_of_all_kinds_at_once_answer_like_each_alone(hybrid: Server) -> None:
    """With drafts on, which are the default; the schemas hold."""
    asked = bodies()
    expected = [completed(hybrid, **each)["choices"] for each in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda each: completed(hybrid, **each)["choices"], asked))
    assert found == expected
    for each in found[-2:]:
        assert json.loads(each[0]["text"])["another_name"] == "text"
    assert "passed; batch invariance to the bit" in hybrid.banner


def test_a_prediction_saves_steps_and_changes_no_logprob(hybrid: Server) -> None:
    """The usage counts the tokens that were chosen."""
    body = {"model": "yarn-4", "messages": [{"role": "user", "content": "ab"}], "seed": 3}
    body |= {"temperature": 1, "max_tokens": 50, "logprobs": True, "logit_bias": LETTERS}
    url = f"{hybrid.url}/v1/chat/completions"
    plain = httpx.post(url, json=body, timeout=60).json()["choices"][0]
    body["prediction"] = {"type": "content", "content": plain["message"]["content"]}
    again = httpx.post(url, json=body, timeout=60).json()
    assert again["choices"][0] == plain
    assert again["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 5
