"""Bodies of other servers: a suggestion is right, or there is none."""

import pytest

from ropewalk.server.api.completion_schema import CompletionRequest
from ropewalk.server.api.strict_body import Body
from ropewalk.server.turns.chat_schema import ChatRequest
from ropewalk.server.turns.message_schema import MessagesRequest
from ropewalk.server.turns.response_schema import ResponsesRequest
from ropewalk.server.wording import did_you_mean

# Fields of other servers that are as near to one of ours as a misspelling.
FIELDS = ("allowed_token_ids", "inputs", "min_p", "min_tokens", "models", "top_a", "top_k", "typ_p")

CHAT, COMPLETION, RESPONSES, MESSAGES = bodies = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
)


def told(body: type[Body], name: str) -> str:
    """What a body says about a field that it has not."""
    (problem,) = (text for field, text in body._problems_of_names({name: 1}) if field == name)
    return problem


@pytest.mark.parametrize(
    ("body", "name", "words"),
    [
        (COMPLETION, "n_predict", "`max_tokens`"),
        (RESPONSES, "n_predict", "`max_output_tokens`"),
        (COMPLETION, "n_probs", "`logprobs`"),
        (CHAT, "n_probs", "`top_logprobs`"),
        (MESSAGES, "stop", "`stop_sequences`"),
        (COMPLETION, "grammar", "`guided_regex`, or `response_format` with a JSON schema"),
        (RESPONSES, "messages", "`input`"),
        (CHAT, "system", "`messages` with a message of the role system"),
        (CHAT, "positions", "`rope` with this field"),
        (COMPLETION, "messages", "`prompt` (`messages` is a field of /v1/chat/completions)"),
    ],
)
def test_a_field_of_the_same_meaning_is_named(body: type[Body], name: str, words: str) -> None:
    """Each body has its own field of that meaning."""
    assert told(body, name) == f"is not supported, use {words}"


@pytest.mark.parametrize("body", bodies)
def test_no_field_of_another_server_is_taken_for_a_misspelling(body: type[Body]) -> None:
    """`allowed_token_ids` was answered with `stop_token_ids`, which does the opposite."""
    for name in FIELDS:
        if name not in body.known:
            assert "Did you mean" not in told(body, name), name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("temprature", "temperature"), ("max_token", "max_tokens"), ("maxTokens", "max_tokens")),
        *(("top-p", "top_p"), ("mesages", "messages"), ("toosl", "tools")),
        *(("foo", None), ("x", None), ("token_ids", None), ("format", None), ("choice", None)),
    ],
)
def test_a_misspelt_field_is_told_the_right_one(name: str, meant: str | None) -> None:
    """Few letters differ, or two neighbours are swapped."""
    hint = "" if meant is None else f". Did you mean `{meant}`?"
    assert told(CHAT, name) == f"is not a field of this body, remove it{hint}"


def test_two_names_that_are_equally_near_are_no_suggestion() -> None:
    """Either one could be wrong."""
    assert did_you_mean("top_z", ["top_k", "top_p"]) == ""
    assert did_you_mean("top_z", ["top_p"]) == " Did you mean `top_p`?"
