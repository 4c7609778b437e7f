"""The operator's defaults, laid over those of the model's files, and a bound of every answer."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.server.settings.load import SettingsError, load_settings
from tests.server.api.asking import asked, refused
from tests.servers.processes import Server, running_server

PROMPT = "import os\n\ndef join(a, b):\n    return"
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
MOST = 10


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model with defaults, one of which is the operator's."""
    model = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(EMBEDDED_MODEL, model)
    stated = {"eos_token_id": 1, "temperature": 1.8, "top_k": 30, "max_new_tokens": 3}
    (model / "generation_config.json").write_text(json.dumps(stated))
    override = json.dumps({"temperature": 0.9, "top_p": 0.8, "max_new_tokens": MOST})
    with running_server(str(model), "--override-generation-config", override) as server:
        yield server


def text_of(server: Server, **fields: Any) -> str:
    found = asked(server, "completions", **{"prompt": PROMPT, "seed": 7, **fields})
    return str(found["choices"][0]["text"])


def test_an_override_is_laid_over_the_defaults_of_the_model(bounded: Server) -> None:
    """Fields that a request leaves out are as if it had sent the values; its own values win."""
    sent = {"temperature": 0.9, "top_p": 0.8, "top_k": 30}
    assert text_of(bounded) == text_of(bounded, **sent)
    for other in ({"temperature": 1.8}, {"top_p": 1.0}, {"top_k": 0}, {"temperature": 0}):
        assert text_of(bounded, **other) == text_of(bounded, **{**sent, **other})
    texts = {
        text_of(bounded, seed=seed, **other) for seed in range(3) for other in ({}, {"top_k": 1})
    }
    assert len(texts) > 2, "the values change answers"


@pytest.mark.parametrize(
    ("fields", "num"), [({}, MOST), ({"max_tokens": 200}, MOST), ({"max_tokens": 4}, 4)]
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_no_answer_is_longer_than_the_bound(
    bounded: Server, route: str, fields: dict[str, int], num: int
) -> None:
    """As in vLLM, a larger number is lowered. The answer has not used its room."""
    prompt = {"prompt": PROMPT} if route == "completions" else CHAT
    found = asked(bounded, route, **prompt, **fields, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == num
    assert found["choices"][0]["finish_reason"] == "length"
    assert "ended_by" not in found["choices"][0]["rope"]


def test_the_other_routes_have_the_bound(bounded: Server) -> None:
    """They say in their words why the answer ended."""
    found = asked(bounded, "responses", input=PROMPT)
    assert found["usage"]["output_tokens"] == MOST
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    found = asked(bounded, "messages", **CHAT, max_tokens=500)
    assert (found["usage"]["output_tokens"], found["stop_reason"]) == (MOST, "max_tokens")


def test_an_answer_that_fills_the_context_first_says_so(bounded: Server) -> None:
    """Its room is less than the bound."""
    longest = httpx.get(f"{bounded.url}/v1/models").json()["data"][0]["max_model_len"]
    fields = {"ignore_eos": True, "truncate_prompt_tokens": longest - 3}
    content = "import os " * longest
    found = asked(
        bounded, "chat/completions", messages=[{"role": "user", "content": content}], **fields
    )
    assert found["usage"]["completion_tokens"] == 4
    assert found["choices"][0]["rope"]["ended_by"] in ("tier", "max_model_len")


def test_more_tokens_than_the_bound_cannot_be_asked_for(bounded: Server) -> None:
    """The sentence names the bound, not the number that the request has sent."""
    body = {"prompt": PROMPT, "max_tokens": 50, "min_tokens": 20}
    message = refused(bounded, "completions", **body)["message"]
    assert message == f"`min_tokens` must be <= the server's max_new_tokens ({MOST}). Given: 20"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ('{"temperature": 3}', "temperature must be a number from 0 to 2, got"),
        ('{"top_p": 0, "min_p": 2}', "top_p must be a number above 0 and at most 1; min_p must be"),
        ('{"max_new_tokens": 0}', "max_new_tokens must be an integer of at least 1, got"),
        ('{"tempature": 1}', "tempature is not one of its fields, which are temperature, top_p"),
        ("[1]", "must be an object, got [1]"),
    ],
)
def test_a_wrong_override_refuses_the_start(value: str, told: str) -> None:
    """The sentence names each wrong field with its limit."""
    with pytest.raises(SettingsError) as refused:
        load_settings({"override_generation_config": value})
    assert str(refused.value).startswith(f"override_generation_config: {told}")
