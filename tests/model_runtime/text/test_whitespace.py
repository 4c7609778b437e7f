"""The whitespace of structured answers: one space in a place, or what a pattern allows."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ropewalk.model_runtime.errors import RequestError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.model_runtime.text.whitespace import ANY, NONE, ONE_SPACE, checked_whitespace
from tests.doubles.engines import EngineFactory, Result, answer, deployment_of, request

FLAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "member"],
    "additionalProperties": False,
}
SPACED = '{ "name" : "a" , "age" : 1 , "member" : true }'
WIDE = '{\n  "name": "a",\n  "age": 1,\n  "member": true\n}'
COMPACT = '{"name":"a","age":1,"member":true}'


@pytest.fixture(scope="module")
def compiler(embedded: Checkpoint) -> GrammarCompiler:
    """A compiler over the embedded model's tokenizer."""
    return GrammarCompiler(embedded.tokenizer)


def accepts(
    compiler: GrammarCompiler, tokens: Sequence[int], whitespace: str | None = None
) -> bool:
    """Whether the grammar of the flat schema allows an answer of these tokens."""
    grammar = compiler.compile(compiler.text_of(FLAT), whitespace).result()
    constraint = grammar.begin(frozenset())
    for token_id in tokens:
        constraint.look()
        if not constraint.allowed[token_id // 8] >> token_id % 8 & 1:
            return False
        constraint.advance(token_id)
    return not constraint.look()


@pytest.mark.parametrize(
    ("whitespace", "texts"),
    [
        (None, [COMPACT, SPACED]),
        (ONE_SPACE, [COMPACT, SPACED]),
        (NONE, [COMPACT]),
        (ANY, [COMPACT, SPACED, WIDE]),
        (r"\n? {0,2}", [COMPACT, SPACED, WIDE]),
        ("( |\\n)", [COMPACT, SPACED]),
    ],
)
def test_a_place_holds_what_the_pattern_allows(
    compiler: GrammarCompiler, embedded: Checkpoint, whitespace: str | None, texts: list[str]
) -> None:
    """No whitespace is always allowed; the default allows one space."""
    for text in (COMPACT, SPACED, WIDE):
        assert json.loads(text)
        tokens = embedded.tokenizer.encode(text, add_special_tokens=False)
        assert accepts(compiler, tokens, whitespace) is (text in texts), text


def test_weak_models_finish(
    compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """A flat answer at temperature 1 used to need more than 200 tokens with seed 2."""
    text = compiler.text_of(FLAT)
    prompt = embedded.tokenizer.encode("import json\n\ndata = ")

    def answers(whitespace: str | None) -> list[Result]:
        grammar = compiler.compile(text, whitespace).result()
        requests = [
            request(deployment_of(embedded), prompt, seed=seed, temperature=1.0, max_tokens=80)
            for seed in range(16)
        ]
        return answer(
            engines.over(embedded), *(replace(each, grammar=grammar) for each in requests)
        )

    compact = answers(None)
    assert all(each.finish_reason is FinishReason.STOP for each in compact)
    assert not all(each.finish_reason is FinishReason.STOP for each in answers(ANY))


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (".", "may contain spaces"),
        ("[^a]", "may contain spaces"),
        (r"\s", "may contain spaces"),
        (" *", "may contain spaces"),
        (" +", "may contain spaces"),
        (" {2,}", "may contain spaces"),
        ("[\t- ]", "may contain spaces"),
        (r"\x0b", "may contain spaces"),
        ("\u00a0", "may contain spaces"),
        ("[ ", "is no regular expression"),
        (" {5,2}", "is no regular expression"),
        (" " * 65, "at most 64 characters, got 65"),
    ],
)
def test_a_pattern_matches_bounded_whitespace_only(pattern: str, problem: str) -> None:
    """Any other pattern would let answers be no JSON, or never end."""
    with pytest.raises(ValueError, match=problem):
        checked_whitespace(pattern)


@pytest.mark.parametrize(
    "pattern", [ONE_SPACE, NONE, ANY, "[ \t]{0,4}", r"(\n|\r\n)?", r"[\n\x20]"]
)
def test_usual_patterns_are_accepted(pattern: str) -> None:
    """Classes, groups, escapes and bounds are the parts of a pattern."""
    assert checked_whitespace(pattern) == pattern


def test_a_hostile_pattern_is_bounded_like_a_schema(compiler: GrammarCompiler) -> None:
    """The trial process compiles the pattern, too."""
    nested = checked_whitespace("((((( {1,99}){1,99}){1,99}){1,99}){1,99}){1,99}")
    try:
        grammar = compiler.compile(compiler.text_of(FLAT), nested).result(timeout=15)
    except RequestError:
        return
    assert grammar.begin(frozenset()).look()
