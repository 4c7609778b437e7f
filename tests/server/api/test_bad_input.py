"""Bad input is answered with 400 in OpenAI's envelope and the field's name; never 422 or 5xx."""

import re
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from ropewalk.server.api.completion_schema import CompletionRequest
from tests.server.api.asking import asked, refused
from tests.servers.processes import Server, running_server


def post(server: Server, body: bytes | str, **headers: str) -> httpx.Response:
    """Send raw bytes to the completions route."""
    headers = {"Content-Type": "application/json", **headers}
    return httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ('{"prompt": "a", "temperature": NaN}', "temperature", "finite number. Given: NaN"),
        ('{"prompt": "a", "top_p": 0}', "top_p", "must be above 0. Given: 0"),
        ('{"prompt": "a", "max_tokens": "5"}', "max_tokens", 'must be an integer. Given: "5"'),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens", "`max_tokens` of 0 needs `echo`"),
        ('{"prompt": "a", "seed": ' + "9" * 100 + "}", "seed", "more than 20 digits"),
        (
            '{"prompt": "a", "stop": [' + '"a", ' * 64 + '"a"]}',
            "stop",
            "most 64 items. Given: 65",
        ),
        (
            '{"prompt": "a", "stop": "' + "x" * 257 + '"}',
            "stop",
            "at most 256 characters. Given: 257",
        ),
        ('{"prompt": "a", "stop_token_ids": [' + "1," * 128 + "1]}", "stop_token_ids", "most 128"),
        ('{"prompt": "a", "stop": 5}', "stop", "must be a string or a list of strings"),
        ('{"prompt": "a", "n": 17}', "n", "must be at most 16 answers. Given: 17"),
        ('{"prompt": "a", "best_of": 17}', "best_of", "must be at most 16 answers. Given: 17"),
        ('{"prompt": "a", "n": 3, "best_of": 2}', "best_of", "must be >= `n` (3)"),
        ('{"prompt": "a", "best_of": 2, "stream": true}', "best_of", "cannot be streamed"),
        ('{"prompt": "a", "best_of": 2, "echo": true, "max_tokens": 0}', "best_of", "needs `max_t"),
        ('{"prompt": "a", "stream_options": {}}', "stream_options", "needs `stream`"),
        ('{"prompt": "a", "suffix": "b"}', "suffix", "not supported, remove it"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias", "must be named by a token id"),
        ('{"prompt": "a", "logit_bias": {"9999": 1}}', "logit_bias", "must be < 2048"),
        ('{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias", "at most 100. Given: 101"),
        ('{"prompt": "a", "stop_token_ids": [4000]}', "stop_token_ids", "must be < 2048"),
        ('{"prompt": "a", "min_tokens": 17}', "min_tokens", "must be <= `max_tokens`"),
        ('{"prompt": [1, 2048]}', "prompt", "must be < 2048. Given: 2048"),
        ('{"prompt": ["a", 5]}', "prompt", "must be a string, a list of strings, a list of"),
        ('{"prompt": [' + '"a", ' * 64 + '"a"]}', "prompt", "at most 64 items. Given: 65"),
        ('{"prompt": "\\ud800"}', "prompt", "Unicode"),
        ('{"prompt": "a", "rope": "yarn"}', "rope", 'must be an object. Given: "yarn"'),
        ('{"prompt": "a", "rope": {"rope_type": "magic"}}', "rope.rope_type", "Given: magic"),
        (
            '{"prompt": "a", "rope": {"rope_type": "default", "factor": 2}}',
            "rope.factor",
            "must be 1 under `rope_type` default. Given: 2",
        ),
        ('{"prompt": "a", "rope": {"factor": 9}}', "rope.factor", "between 1 and 8. Given: 9"),
        (
            '{"prompt": "a", "response_format": {"type": "json_objct"}}',
            "response_format.type",
            'or json_schema. Given: "json_objct". Did you mean `json_object`?',
        ),
        ('{"prompt": "a"', None, "not valid JSON, at character 14"),
        ("[1, 2]", None, "must be a JSON object"),
        ("", None, "must be a JSON object"),
        ('{"prompt": ' + "9" * 5000 + "}", None, "JSON in UTF-8, with numbers of at most 4300"),
        ('{"prompt": ' + "[" * 100_000, None, "nested at most 64 deep"),
    ],
)
def test_refusals_name_the_field(
    server: Server, body: str, param: str | None, message: str
) -> None:
    """The message of a refusal states the field, the limit and any value that is a number."""
    answer = post(server, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    named = (error["param"] or "").split(".")  # a field, then where inside it
    assert named[: len((param or "").split("."))] == (param or "").split(".")
    assert message in error["message"]
    assert len(answer.content) < 10_000


BOUNDS: dict[str, tuple[float, float | None]] = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "top_k": (-1, None),
    "max_tokens": (0, None),
    "min_tokens": (0, None),
    "truncate_prompt_tokens": (-1, None),
}


@pytest.mark.parametrize(("name", "bounds"), BOUNDS.items(), ids=list(BOUNDS))
def test_numbers_are_taken_up_to_their_bounds_and_not_beyond(
    name: str, bounds: tuple[float, float | None]
) -> None:
    """The bounds are OpenAI's, or vLLM's for its fields."""
    for bound, step in zip(bounds, (-1, 1), strict=True):
        if bound is not None:
            fields = {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 16, name: bound}
            assert getattr(CompletionRequest.model_validate(fields), name) == bound
            with pytest.raises(ValidationError) as caught:
                CompletionRequest.model_validate({**fields, name: bound + step})
            assert [each["loc"][0] for each in caught.value.errors()] == [name]


@pytest.mark.parametrize(
    ("route", "body", "key"),
    [
        ("v1/completions", '{"prompt": "a", "prompt": "b"}', "prompt"),
        ("v1/completions", '{"prompt": "a", "\\u0070rompt": "a"}', "prompt"),
        ("v1/completions", '{"prompt": "a", "rope": {"factor": 2, "factor": 4}}', "factor"),
        ("v1/chat/completions", '{"messages": [{"role": "user", "role": "user"}]}', "role"),
        ("detokenize", '{"tokens": [1], "tokens": [2]}', "tokens"),
        ("v1/completions", '{"\\ud800": 1, "\\ud800": 1}', "\\ud800"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(
    server: Server, route: str, body: str, key: str
) -> None:
    """One of the two values would be lost in silence."""
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/{route}", content=body, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == key
    assert error["message"] == f"`{key}` is given twice in the same object, remove one"


def test_the_check_for_equal_keys_reads_all_that_json_may_be(server: Server) -> None:
    """The encodings of JSON work as before, and equal keys in different objects are fine."""
    body = '{"model": null, "prompt": "ä", "rope": {"factor": null}, "max_tokens": 1}'
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert post(server, body.encode(encoding)).status_code == 200, encoding
    answer = post(server, b'{"prompt": "\xff"}')
    assert answer.status_code == 400
    assert "JSON in UTF-8" in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", ""])
def test_a_wrong_content_type_is_said(server: Server, content_type: str) -> None:
    """The form that curl sends without a header is refused by its content type."""
    answer = post(server, '{"prompt": "a"}', **{"Content-Type": content_type})
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_unknown_models_routes_and_methods(server: Server) -> None:
    """The errors of unknown names come in the same envelope, with 404 or 405."""
    answer = post(server, '{"prompt": "a", "model": "gpt-\\u00e9"}')
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "Served: ropewalk-demo" in answer.json()["error"]["message"]
    answer = httpx.get(f"{server.url}/v1/nothing")
    told = "The server has no route '/v1/nothing'. /docs lists them."
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, told)
    answer = httpx.get(f"{server.url}/v1/completions")
    told = "The route /v1/completions accepts POST, not GET."
    assert (answer.status_code, answer.json()["error"]["message"]) == (405, told)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/completion", "/v1/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/Chat/Completions", "/v1/chat/completions"),
        ("/healthz", "/health"),
    ],
)
def test_a_route_that_was_nearly_met_is_suggested(server: Server, path: str, meant: str) -> None:
    """The suggestion stands in the envelope of any error."""
    error = httpx.post(f"{server.url}{path}", json={}).json()["error"]
    assert error["message"] == f"The server has no route '{path}'. Did you mean `{meant}`?"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"), [(2049, 1, 9.0), (2000, 100, 9.0), (10, 9000, 36.0)]
)
def test_the_error_of_a_too_long_request_names_a_length_that_fits(
    openai_client: openai.OpenAI, num_prompt: int, max_tokens: int, fits: float
) -> None:
    """The message has prompt, answer and their sum, and the positions that they take."""
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.completions.create(
            model="ropewalk-demo", prompt=[5] * num_prompt, max_tokens=max_tokens
        )
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("prompt" if num_prompt > 2048 else "max_tokens")
    body: Any = caught.value.body
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (num_prompt, 2048)
    assert body["rope"] == {"rope_type": "yarn", "factor": 8.0, "factor_that_fits": fits}
    assert "2048 tokens (the longest tier, of factor 8)" in body["message"]
    assert f"A rope factor of {fits:g} " in body["message"]
    numbers = r"has (\d+) tokens \((\d+) in the prompt and max_tokens (\d+)\)[^.]* (\d+) in all"
    found = re.search(numbers, body["message"])
    assert found, body
    total, prompt, answer, positions = map(int, found.groups())
    assert (prompt, answer) == (num_prompt, max_tokens)
    assert total == prompt + answer == positions + 1


def test_a_request_beyond_the_cache_is_longer_than_the_context() -> None:
    """The longest tier could hold the prompt, but max_model_len is what the cache holds."""
    with running_server("--kv-cache-tokens", "512") as small:
        assert "512 tokens (the size of the KV cache)" in small.banner
        error = refused(small, "completions", prompt=[5] * 513, max_tokens=1)
        assert error["code"] == "context_length_exceeded"
        assert (error["n_prompt_tokens"], error["n_ctx"], error["max_tokens"]) == (513, 512, 1)
        assert "context length is 512 tokens (the size of the KV cache)" in error["message"]
        chat_limit = "max_completion_tokens"
        chat = {"messages": [{"role": "user", "content": "a " * 200}], chat_limit: 500}
        error = refused(small, "chat/completions", **chat)
        assert (error["code"], error["param"]) == ("context_length_exceeded", chat_limit)
        most = 512 - error["n_prompt_tokens"] + 1
        assert error["message"].endswith(f" max_tokens may be at most {most}.")
        # A prompt that is too long is refused for its length, whatever else would not fit then.
        chat = {"messages": [{"role": "user", "content": "a " * 600}], "min_tokens": 5}
        error = refused(small, "chat/completions", **chat)
        assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 512)
        assert (error["param"], error["max_tokens"]) == ("messages", None)
        page = httpx.get(f"{small.url}/metrics").text
        assert 'rejected_total{reason="context_length_exceeded"} 3.0' in page
        assert httpx.get(f"{small.url}/v1/models").json()["data"][0]["max_model_len"] == 512
        asked(small, "completions", prompt=[5] * 512, max_tokens=1)


@pytest.mark.alone  # it is about seconds
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("detokenize", {"tokens": ["a"] * 40_000}),
        ("v1/completions", {"prompt": [1.5] * 40_000}),
        ("v1/completions", {f"field{at}": 1 for at in range(40_000)}),
        ("v1/completions", {"prompt": "a", "logit_bias": {f"x{at}": 1 for at in range(40_000)}}),
        ("v1/completions", {"logit_bias": {f"x{at}": 1 for at in range(40_000)}, "foo": 1}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": [5] * 40_000}]}),
        ("v1/chat/completions", {"messages": [5] * 40_000}),
    ],
    ids=["tokens", "prompt", "fields", "logit_bias", "keys", "parts", "messages"],
)
def test_thousands_of_mistakes_are_told_like_one(
    server: Server, route: str, body: dict[str, Any]
) -> None:
    """There are as many as a body may hold. An error for each would take seconds."""
    answer = httpx.post(f"{server.url}/{route}", json=body, timeout=30)
    assert answer.status_code == 400
    assert len(answer.content) < 2000
    assert answer.elapsed.total_seconds() < 1.0
