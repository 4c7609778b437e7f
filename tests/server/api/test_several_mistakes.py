"""A refusal names all mistakes of a body, at most ten."""

from typing import Any

import pytest

from ropewalk.server.api.strict_body import given
from tests.server.api.asking import refused
from tests.server.api.test_bad_input import post
from tests.servers.processes import Server


def test_a_field_of_the_other_route_is_told_its_route(server: Server) -> None:
    """`cache_prompt` was suggested for `prompt`."""
    for path, body, told in (
        ("chat/completions", {"prompt": "a"}, "`messages` (`prompt` is a field of /v1/completions"),
        (
            "completions",
            {"messages": []},
            "`prompt` (`messages` is a field of /v1/chat/completions",
        ),
    ):
        assert f"is not supported, use {told})" in refused(server, path, **body)["message"]


def test_a_given_text_is_told_whole_up_to_64_characters() -> None:
    for length, end in ((64, '"'), (65, '"...')):
        assert given("x" * length) == f'. Given: "{"x" * 64}{end}'


def test_all_problems_are_reported_at_once(server: Server) -> None:
    """Unknown and unsupported fields are named beside wrong values and conflicts."""
    error = post(server, '{"temperature": "x", "top_p": "x", "foo": 1}').json()["error"]
    assert error["message"].split("; ") == [
        '`temperature` must be a number. Given: "x"',
        '`top_p` must be a number. Given: "x"',
        "`prompt` is missing",
        "`foo` is not a field of this body, remove it",
    ]
    body = """{"prompt": "a", "suffix": "b", "temprature": 1, "rope": {"type": "yarn", "factor": 0},
        "ignore_eos": true, "return_progress": true}"""
    error = post(server, body).json()["error"]
    assert error["message"].split("; ") == [
        "`rope.factor` must be at least 1. Given: 0",
        "`rope.type` is not supported, use `rope_type`",
        "`suffix` is not supported, remove it",
        "`temprature` is not a field of this body, remove it. Did you mean `temperature`?",
    ]
    body = """{"prompt": "a", "foo": 1, "ignore_eos": true, "return_progress": true,
        "response_format": {"type": "json_object"}}"""
    error = post(server, body).json()["error"]
    assert error["message"].split("; ") == [
        "`foo` is not a field of this body, remove it",
        "`return_progress` needs `stream`: true",
        "`ignore_eos` cannot be true together with a `response_format` of JSON",
    ]


@pytest.mark.parametrize(
    ("route", "body", "told"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user"}, {"role": "critic"}, {"role": "user", "content": 5}]},
            ["`messages.0.content` is", "`messages.1.role` must", "`messages.2.content` must"],
        ),
        ("completions", {"prompt": [1, -1, -2]}, ["`prompt.1` must", "`prompt.2` must"]),
        ("completions", {"prompt": []}, ["`prompt` must"]),
        ("completions", {"prompt": [[1]] * 1025}, ["`prompt` must"]),
        ("completions", {"prompt": "a", "stop": ["", "b", ""]}, ["`stop.0` must", "`stop.2` must"]),
        (
            "completions",
            {"prompt": "a", "n": 17, "stop_token_ids": [9999, 8888]},
            ["`n` must", *["`stop_token_ids` token"] * 2],
        ),
    ],
    ids=["messages", "ids", "empty", "long", "stop", "limits"],
)
def test_mistakes_in_several_items_are_told_at_once(
    server: Server, route: str, body: dict[str, Any], told: list[str]
) -> None:
    """A list does not end at its first wrong item, and equal sentences are reported once."""
    body = {**body, "foo": 1} if route.startswith("chat") else body
    error = refused(server, route, **body)
    starts = [" ".join(each.split()[:2]) for each in error["message"].split("; `")]
    told = [each.removeprefix("`") if at else each for at, each in enumerate(told)]
    assert starts[: len(told)] == told
    assert len(starts) == len(told) + ("foo" in body)


def test_at_most_ten_problems_are_reported(server: Server) -> None:
    """Ten unknown fields leave room for a wrong value, which comes first."""
    body = {"prompt": "a", "top_p": 2, **{f"field{at}": 1 for at in range(30)}}
    told = refused(server, "completions", **body)["message"].split("; ")
    assert len(told) == 10
    assert told[0] == "`top_p` must be at most 1. Given: 2"
    assert told[-1] == "`field8` is not a field of this body, remove it"
