"""The list of served models, and text to tokens and back."""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from ropewalk.server.startup.app import create_app
from tests.server.api.asking import asked
from tests.server.api.tools.scripted import Scripted, saying
from tests.servers.processes import Server


def test_one_model_by_name(openai_client: openai.OpenAI) -> None:
    """The openai client retrieves a model with its longest context."""
    model = openai_client.models.retrieve("ropewalk-demo")
    assert model.model_extra is not None
    assert model.owned_by == "ropewalk"
    assert model.model_extra["max_model_len"] == 2048
    assert model.model_extra["meta"] == {"n_ctx": 2048, "n_ctx_train": 256}
    assert model.model_extra["same_bits_in_any_batch"] is True, "on a CPU"
    about = model.model_extra["ropewalk"]
    assert about.pop("allowed_rope_types")[:2] == ["default", "dynamic"]
    assert [tuple(each.values()) for each in about.pop("tiers")] == [
        (256, 1, "default"), (512, 2, "yarn"), (1024, 4, "yarn"), (2048, 8, "yarn"),
    ]  # fmt: skip
    assert about == {
        "original_max_position_embeddings": 256,
        "rope_type": "yarn",
        "policy": "by_position",
        "max_rope_factor": 8,
        "kv_cache_dtype": "auto",
        "tool_format": "generic",
        "reasoning": None,
    }
    cache = model.model_extra["kv_cache"]
    assert cache["bytes"] == {"pages": cache["tokens"] * 4096}
    with pytest.raises(openai.NotFoundError, match="no/such"):
        openai_client.models.retrieve("no/such")


@pytest.mark.parametrize("is_promised", [True, False])
def test_models_and_answers_say_which_promise_holds(*, is_promised: bool) -> None:
    """A load finds whether an answer has the same bits in any batch."""

    async def listed(server: Scripted) -> httpx.Response:
        async with server.http() as http:
            return await http.get("/v1/models")

    with saying("Hi.") as server:
        service = replace(server.service, has_same_bits=is_promised)
        promising = Scripted(service, create_app(service))
        (choice,) = promising.ask().choices
        (model,) = asyncio.run(listed(promising)).json()["data"]
    assert choice.model_extra["rope"]["same_bits_in_any_batch"] is is_promised
    assert model["same_bits_in_any_batch"] is is_promised


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_detokenize_undoes_tokenize(server: Server, add_special_tokens: bool) -> None:  # noqa: FBT001
    """Special tokens are in the text unless `skip_special_tokens` is set."""
    text = Path(__file__).read_text()[:2000] + "żółw 縄 🪢"
    body = {"prompt": text, "add_special_tokens": add_special_tokens}
    told = httpx.post(f"{server.url}/tokenize", json=body).json()
    tokens = told["tokens"]
    assert (told["count"], told["max_model_len"]) == (len(tokens), 2048)
    back = httpx.post(
        f"{server.url}/detokenize", json={"tokens": tokens, "skip_special_tokens": True}
    )
    assert back.json() == {"prompt": text}
    whole = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert whole.endswith(text)
    assert (whole == text) == (not add_special_tokens)


def test_messages_are_tokenised_as_the_chat_route_does(server: Server) -> None:
    """With tools, calls and results in them."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk: dict[str, object] = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "b"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    counted = httpx.post(f"{server.url}/tokenize", json=talk).json()
    usage = asked(server, "chat/completions", max_tokens=1, **talk)["usage"]
    assert counted["count"] == len(counted["tokens"]) == usage["prompt_tokens"]
    without = httpx.post(f"{server.url}/tokenize", json={**talk, "tool_choice": "none"}).json()
    assert without["count"] < counted["count"]
    told = httpx.post(f"{server.url}/tokenize", json={"prompt": ["a", "b"]}).json()["error"]
    assert told["message"] == "`prompt` must be a string. Given: a list"
    closed = httpx.post(f"{server.url}/tokenize", json={**talk, "add_generation_prompt": False})
    assert closed.json()["tokens"] == counted["tokens"][: closed.json()["count"]]
    assert closed.json()["count"] == counted["count"] - 1
    for body, param in (
        ({}, "prompt"),
        ({**talk, "prompt": "a"}, "messages"),
        ({"prompt": "a", "tools": talk["tools"]}, "tools"),
        (
            {"messages": [{"role": "tool", "tool_call_id": "a", "content": ""}]},
            "messages.0.tool_call_id",
        ),
        ({"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort"),
        ({**talk, "continue_final_message": True}, "continue_final_message"),
        ({**talk, "tool_choice": "maybe"}, "tool_choice"),
        ({"messages": talk["messages"], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ):
        refused = httpx.post(f"{server.url}/tokenize", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"tokens": [5000]}, 400, "tokens"),
        ({"tokens": [-1]}, 400, "tokens.0"),
        ({"tokens": "a"}, 400, "tokens"),
        ({"tokens": [1], "model": "x"}, 404, "model"),
    ],
)
def test_detokenize_refuses_what_is_no_token(
    server: Server, body: dict[str, object], status: int, param: str
) -> None:
    """The error of a value that is no token names the field."""
    answer = httpx.post(f"{server.url}/detokenize", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_special_tokens_are_added_to_a_prompt_unless_told(server: Server) -> None:
    """The field `add_special_tokens` of /v1/completions adds them by default."""

    def num_prompt_tokens(**options: object) -> int:
        answer = asked(server, "completions", prompt="import os", max_tokens=1, **options)
        found: int = answer["usage"]["prompt_tokens"]
        return found

    assert num_prompt_tokens() == num_prompt_tokens(add_special_tokens=True) == 3
    assert num_prompt_tokens(add_special_tokens=False) == 2
