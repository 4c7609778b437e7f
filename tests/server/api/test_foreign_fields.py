"""vLLM's fields on both of OpenAI's older routes, and values without effect, null above all.

Each field is held against the same answer that another field, route or library gives.
"""

import json
import re
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.server.api.asking import asked, refused, streamed, tokens_of
from tests.servers.processes import Server

PROMPT = "import os\n\ndef join(a, b):\n    return"
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 20, 300]}},
    "required": ["size"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": PROMPT, **GREEDY},
    "chat/completions": {"messages": [{"role": "user", "content": PROMPT}], **GREEDY},
}
BOTH = pytest.mark.parametrize("route", list(BODIES))
# Values that ask for what every answer has.
WITHOUT_EFFECT: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "best_of": 1,
    "echo": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "return_tokens_as_token_ids": False, "bad_words": [],
    "return_token_ids": False, "cache_prompt": True, "structured_outputs": {},
    "priority": 0, "response_format": {"type": "text"}, "store": False, "service_tier": "auto",
    "user": "somebody", "metadata": {"team": "a"}, "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "safety_identifier": "s", "verbosity": "medium",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
}  # fmt: skip


def post(server: Server, route: str, **fields: Any) -> Any:
    """Return the first choice and the whole answer of a route's body with these fields."""
    answer = asked(server, route, **{**BODIES[route], **fields})
    return answer["choices"][0], answer


def events(server: Server, route: str, **fields: Any) -> list[Any]:
    """Return the events of a stream."""
    return streamed(server, route, **{**BODIES[route], **fields})


def text_of(choice: Any) -> str:
    """Return the text of a choice or of its piece on either route."""
    inner = choice.get("message") or choice.get("delta") or choice
    return str(inner.get("content") or inner.get("text") or "")


def tokens(server: Server, text: str) -> list[int]:
    """Return the tokens of a text alone."""
    return tokens_of(server, text, add_special_tokens=False)


def detokenized(server: Server, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """Return the text of some tokens by the route that only decodes."""
    body = {"tokens": token_ids, "skip_special_tokens": skip_special_tokens}
    return str(httpx.post(f"{server.url}/detokenize", json=body).json()["prompt"])


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=["object", "text", "structured_outputs"],
)
def test_a_schema_under_vllms_names_is_that_of_response_format(
    server: Server, fields: dict[str, Any]
) -> None:
    """All names give the same answer to the byte."""
    found = text_of(post(server, "completions", **fields)[0])
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    assert found == text_of(post(server, "completions", response_format=named)[0])
    assert jsonschema_rs.is_valid(SCHEMA, json.loads(found))


@pytest.mark.parametrize(
    ("pattern", "is_new"),
    [(r"^(GET|PUT) /[a-z]{2,5}/\d{1,3}$", False), ("(a|ü)\\\n\n", True)],
)
def test_a_regular_expression_matches_the_whole_answer(
    server: Server, pattern: str, *, is_new: bool
) -> None:
    """Anchors at both ends are allowed and say nothing more."""
    fields = {"structured_outputs": {"regex": pattern}} if is_new else {"guided_regex": pattern}
    choice, _ = post(server, "completions", temperature=1, seed=3, **fields)
    assert re.fullmatch(pattern, text_of(choice)), choice
    assert choice["finish_reason"] == "stop"


@BOTH
def test_a_choice_is_one_of_those_given(server: Server, route: str) -> None:
    """Quotes and line breaks of a choice come as they are, in a stream, too."""
    choices = ['say "yes"', "no\n\nnever", "péut-être"]
    found = [
        text_of(post(server, route, temperature=1.5, seed=seed, guided_choice=choices)[0])
        for seed in range(6)
    ]
    assert set(found) <= set(choices)
    assert len(set(found)) > 1
    pieces = events(server, route, temperature=1.5, seed=0, structured_outputs={"choice": choices})
    assert "".join(text_of(each["choices"][0]) for each in pieces) == found[0]


def test_a_choice_stands_beside_tools(server: Server) -> None:
    """The answer is a call or one of the choices; without a choice to call, it is the latter."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    choice, _ = post(
        server, "chat/completions", tools=[tool], guided_choice=["red", "blue"], max_tokens=60
    )
    message = choice["message"]
    assert message.get("tool_calls") or message["content"] in {"red", "blue"}, choice
    free, _ = post(
        server,
        "chat/completions",
        tools=[tool],
        tool_choice="none",
        guided_choice=["red", "blue"],
    )
    assert free["message"]["content"] in {"red", "blue"}


def test_a_bad_word_of_one_token_is_the_token_that_a_bias_bars(server: Server) -> None:
    """The answer equals the one with a logit_bias that no token survives."""
    route = "completions"
    plain = post(server, route, return_token_ids=True)[0]
    token = next(each for each in plain["token_ids"] if detokenized(server, [each]).strip())
    word = detokenized(server, [token]).lstrip()
    barred = [ids[0] for each in (word, f" {word}") if len(ids := tokens(server, each)) == 1]
    assert token in barred
    found = post(server, route, bad_words=[word])[0]
    biased = post(server, route, logit_bias={str(each): -100 for each in barred})[0]
    assert text_of(found) == text_of(biased) != text_of(plain)


def test_only_allowed_tokens_come(server: Server) -> None:
    """Greedy answers equal those with a bias that no other token reaches."""
    route = "completions"
    allowed = [*range(20, 300, 7), *tokens(server, "return self.path")]
    bias = {str(each): 100 for each in allowed}
    fields: dict[str, Any] = {"allowed_token_ids": allowed, "return_token_ids": True}
    found = post(server, route, **fields)[0]
    assert found["token_ids"] == post(server, route, logit_bias=bias, **fields)[0]["token_ids"]
    assert text_of(found) == text_of(post(server, route, logit_bias=bias)[0])
    drawn: dict[str, Any] = {**fields, "temperature": 1.5, "n": 4, "seed": 3, "top_p": 0.95}
    choices = post(server, route, **drawn)[1]["choices"]
    assert {each for choice in choices for each in choice["token_ids"]} <= set(allowed)


def test_an_allowed_end_token_ends_the_answer(server: Server) -> None:
    """Without it among the tokens, only max_tokens ends the answer."""
    route = "completions"
    (end,) = tokens(server, httpx.get(f"{server.url}/tokenizer_info").json()["eos_token"])
    choice, answer = post(server, route, allowed_token_ids=[end])
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)
    choice, answer = post(server, route, allowed_token_ids=[50, 60], logit_bias={str(end): 100})
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 24)


def test_a_choice_of_disallowed_tokens_is_refused(server: Server) -> None:
    """The refusal names both fields."""
    fields = {"guided_choice": ["red"], "allowed_token_ids": tokens(server, "blue")}
    message = refused(server, "completions", **BODIES["completions"], **fields)["message"]
    assert message == "`guided_choice`: the grammar allows no token of `allowed_token_ids`"


def test_a_bad_word_of_several_tokens_is_left_out(server: Server) -> None:
    """The answer is the same up to the token that would complete the word, and others may come."""
    route = "completions"
    plain = post(server, route, return_token_ids=True)[0]["token_ids"]
    for at in range(1, len(plain) - 1):  # a pair that the tokenizer splits as the answer does
        pair = plain[at : at + 2]
        word = detokenized(server, pair)
        if word.strip() and tokens(server, word.lstrip()) == pair:
            break
    else:
        pytest.fail("no pair of tokens is a word of its own")
    first = next(n for n in range(len(plain)) if plain[n : n + 2] == pair)
    found = post(server, route, bad_words=[word], return_token_ids=True)[0]["token_ids"]
    assert found[: first + 1] == plain[: first + 1]
    assert found[first + 1] != plain[first + 1]
    assert not any(found[n : n + 2] == pair for n in range(len(found)))
    pieces = events(server, route, bad_words=[word], return_token_ids=True)
    assert [each for piece in pieces for each in piece["choices"][0]["token_ids"]] == found


@BOTH
def test_the_stop_string_stays_in_the_text_if_it_is_asked_for(server: Server, route: str) -> None:
    """The text is the one without the field and the stop string, streamed, too."""
    plain = text_of(post(server, route)[0])
    stop = next(each for each in re.findall(r"\w+\W", plain[3:]) if len(each) > 2)
    without = post(server, route, stop=stop)[0]
    fields = {"stop": ["not there", stop], "include_stop_str_in_output": True, "logprobs": 1}
    if route.startswith("chat"):
        fields |= {"logprobs": True, "top_logprobs": 1}
    choice, _ = post(server, route, **fields)
    assert text_of(choice) == text_of(without) + stop
    assert choice["finish_reason"] == without["finish_reason"] == "stop"
    pieces = events(server, route, **fields)
    assert "".join(text_of(each["choices"][0]) for each in pieces) == text_of(choice)


@BOTH
def test_special_tokens_are_shown_if_they_are_asked_for(server: Server, route: str) -> None:
    """The text is that of /detokenize, which decodes the tokens at once."""
    eos = httpx.get(f"{server.url}/tokenizer_info").json()["eos_token"]
    (end,) = tokens(server, eos)
    fields = {
        "logit_bias": {str(end): 14}, "seed": 1, "temperature": 1, "ignore_eos": True,
        "return_token_ids": True, "max_tokens": 40,
    }  # fmt: skip
    hidden = post(server, route, **fields)[0]
    shown = post(server, route, **fields, skip_special_tokens=False)[0]
    assert shown["token_ids"] == hidden["token_ids"]
    assert end in shown["token_ids"]
    assert eos in text_of(shown)
    assert eos not in text_of(hidden)
    if "\ufffd" not in text_of(shown):
        assert text_of(shown) == detokenized(
            server, shown["token_ids"], skip_special_tokens=False
        ).rstrip("\ufffd")
    pieces = events(server, route, **fields, skip_special_tokens=False)
    assert "".join(text_of(each["choices"][0]) for each in pieces) == text_of(shown)


def test_an_end_token_is_text_only_if_both_fields_ask_for_it(server: Server) -> None:
    """The end token of an answer is a special token and the reason that it stops."""
    eos = httpx.get(f"{server.url}/tokenizer_info").json()["eos_token"]
    (end,) = tokens(server, eos)
    fields: dict[str, Any] = {"logit_bias": {str(end): 100}, "min_tokens": 2}
    texts = [
        post(
            server,
            "completions",
            **fields,
            skip_special_tokens=skip,
            include_stop_str_in_output=included,
        )[0]["text"]
        for skip, included in ((True, False), (True, True), (False, False), (False, True))
    ]
    assert texts == [texts[0], texts[0], texts[0], texts[0] + eos]


@BOTH
def test_a_truncated_prompt_is_its_last_tokens(server: Server, route: str) -> None:
    """The answer equals that to the last tokens as a prompt of ids."""
    whole = post(server, route, return_token_ids=True)
    prompt_ids = whole[0].get("prompt_token_ids") or whole[1]["prompt_token_ids"]
    assert whole[1]["usage"]["prompt_tokens"] == len(prompt_ids) > 5
    choice, answer = post(server, route, truncate_prompt_tokens=5)
    assert answer["usage"]["prompt_tokens"] == 5
    last = post(server, "completions", prompt=prompt_ids[-5:])[0]
    if route == "completions":  # a chat adds stop strings of its template
        assert text_of(choice) == text_of(last)
    assert text_of(choice) == text_of(last)[: len(text_of(choice))]
    assert post(server, route, truncate_prompt_tokens=10**6)[0] == post(server, route)[0]


def test_minus_one_keeps_as_much_of_a_prompt_as_fits(server: Server) -> None:
    """The prompt and its answer then fill the longest context."""
    longest = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    prompt = [*range(40, 60)] * (longest // 20 + 5)
    _, answer = post(server, "completions", prompt=prompt, max_tokens=3, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == longest - 2


def test_prompt_logprobs_are_those_of_an_echo(server: Server) -> None:
    """Each entry begins with the token itself; ranks count the alternatives."""
    echo, _ = post(server, "completions", echo=True, logprobs=3)
    choice, _ = post(server, "completions", prompt_logprobs=3, return_token_ids=True, logprobs=1)
    found = choice["prompt_logprobs"]
    assert found[0] is None
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    assert len(found) == len(choice["prompt_token_ids"])
    for at, (token_id, entry) in enumerate(zip(choice["prompt_token_ids"], found, strict=True)):
        if entry is None:
            continue
        own = entry[str(token_id)]
        assert next(iter(entry)) == str(token_id)
        assert own["logprob"] == echo["logprobs"]["token_logprobs"][at]
        assert own["decoded_token"] == echo["logprobs"]["tokens"][at]
        assert sorted(each["rank"] for each in entry.values() if each["rank"]) == [1, 2, 3]
        assert min(each["logprob"] for each in entry.values() if each["rank"]) >= own[
            "logprob"
        ] or (own["rank"] is not None)


def test_a_chat_has_the_logprobs_of_its_prompt(server: Server) -> None:
    """They are those of a completion of the same tokens."""
    _, chat = post(server, "chat/completions", prompt_logprobs=1, return_token_ids=True)
    ids = chat["prompt_token_ids"]
    choice, _ = post(server, "completions", prompt=ids, prompt_logprobs=1)
    assert chat["prompt_logprobs"] == choice["prompt_logprobs"]


@BOTH
def test_token_ids_are_those_of_the_text(server: Server, route: str) -> None:
    """The stream's ids are those of the whole answer, and only its first event has the prompt's."""
    choice, whole = post(server, route, return_token_ids=True)
    assert detokenized(server, choice["token_ids"]).startswith(text_of(choice))
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    pieces = events(server, route, return_token_ids=True)
    ids = [each for event in pieces for each in event["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]
    prompts = [
        event.get("prompt_token_ids") or event["choices"][0].get("prompt_token_ids")
        for event in pieces
    ]
    assert prompts[0] == (whole.get("prompt_token_ids") or choice["prompt_token_ids"])
    assert not any(prompts[1:])
    if route == "completions":
        assert prompts[0] == tokens_of(server, PROMPT)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "invalid regular expression: unclosed group"),
        ({"guided_json": "{"}, "guided_json", "a JSON schema, as an object or as text"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "`guided_regex` exclude"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "together with `guided_regex`"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "use `regex`"),
        ({"guided_grammar": "x"}, "guided_grammar", "use `guided_regex`, or `response_format`"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        *(
            ({"timings_per_token": True, **more}, "timings_per_token", "one prompt and one answer")
            for more in ({"n": 2}, {"best_of": 2}, {"prompt": ["a", "b"]})
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1. Given: 0"),
        ({"bad_words": ["a", ""]}, "bad_words.1", "at least 1 character"),
        ({"bad_words": ["a"] * 65}, "bad_words", "at most 64 items. Given: 65"),
        ({"length_penalty": 0.5}, "length_penalty", "must be 1, or left out. Given: 0.5"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must have at least 1 item"),
        ({"allowed_token_ids": [5, 2048]}, "allowed_token_ids", "must be < 2048. Given: 2048"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids.0", "must be at least 0. Given: -1"),
        (
            {"allowed_token_ids": [1], "min_tokens": 2},
            "min_tokens",
            "must be 0, because each of `allowed_token_ids` ends the answer. Given: 2",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: Server, fields: dict[str, Any], param: str, message: str
) -> None:
    """The refusal names the field as the client wrote it."""
    error = refused(server, "completions", **{**BODIES["completions"], **fields})
    assert error["param"] == param, error
    assert message in error["message"], error


@BOTH
def test_values_that_change_nothing_pass(server: Server, route: str) -> None:
    """An answer with all of them equals one with none."""
    fields = dict(WITHOUT_EFFECT)
    if route.startswith("chat"):
        fields |= {
            "include_reasoning": True, "reasoning_effort": "low", "modalities": ["text"],
            "chat_template_kwargs": {"enable_thinking": False, "whatever": None},
            "logprobs": False, "top_logprobs": 0, "tool_choice": "none",
            "parallel_tool_calls": True,
        }  # fmt: skip
    assert post(server, route, **fields)[0] == post(server, route)[0]
