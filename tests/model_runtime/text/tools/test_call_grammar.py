"""Grammars of calls: whatever a model samples under them is read as valid calls."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.grammar import Grammar
from ropewalk.model_runtime.text.grammar_trial import matcher_of, problem_of
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.model_runtime.text.tools.answer_reader import AnswerReader, ReadingPlan, TextDelta
from ropewalk.model_runtime.text.tools.argument_schema import arguments_schema
from ropewalk.model_runtime.text.tools.call_grammar import AnswerGrammar, Mode, Thinking
from ropewalk.model_runtime.text.tools.call_stream import whole_calls
from ropewalk.model_runtime.text.tools.find_format import ChatFormats, find_formats
from ropewalk.model_runtime.text.tools.tool_format import ReasoningFormat, Tool, ToolCall
from ropewalk.model_runtime.text.whitespace import ONE_SPACE
from tests.doubles.tokens import byte_tokenizer_fast
from tests.servers.tool_templates import TOOL_TEMPLATES

SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
THINK = ReasoningFormat("<think>", "</think>")
WEATHER = Tool(
    "get_weather",
    None,
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 99},
            "hourly": {"type": "boolean"},
        },
        "required": ["days", "city"],
    },
)
CLOCK = Tool("get_weather_now", None, None)
TOOLS = (WEATHER, CLOCK)
MAX_CALLS = 3


@cache
def tokenizer() -> Tokenizer:
    """A byte tokenizer with special tokens."""
    fast = byte_tokenizer_fast()
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    return Tokenizer(fast)


@cache
def vocabulary() -> LLTokenizer:
    """The library's form of it."""
    from ropewalk.model_runtime.text.grammar import _vocabulary_of

    return _vocabulary_of(tokenizer())


@cache
def formats(name: str) -> ChatFormats:
    """The formats of one of the templates."""
    template = ChatTemplate(TOOL_TEMPLATES[name][0], byte_tokenizer_fast().special_tokens_map)
    return find_formats(template, tokenizer().special_ids)


def compiled(asked: AnswerGrammar, special: dict[str, int]) -> Grammar:
    """The grammar, which must compile with and without special tokens."""
    for ids in ({}, special):
        matcher = matcher_of(asked.lark(ids), vocabulary())
        assert not problem_of(matcher), (problem_of(matcher), asked.lark(ids))
    return Grammar(matcher, vocabulary().eos_token, (asked.lark({}), ONE_SPACE))


def sampled(grammar: Grammar, seed: int, most: int = 1200) -> str | None:
    """A random text under a grammar; None if it did not end."""
    end_id = vocabulary().eos_token - 1 - len(SPECIAL)  # a byte that ends, as an end token does
    constraint = grammar.begin(frozenset([end_id]))
    drawn, ids = random.Random(seed), list[int]()
    while len(ids) < most and constraint.look():
        allowed = [
            at for at in range(len(constraint.allowed) * 8)
            if constraint.allowed[at // 8] >> at % 8 & 1
        ]  # fmt: skip
        if end_id in allowed and drawn.random() < 0.3:
            return text_of(ids)
        allowed = [each for each in allowed if each != end_id]
        ids.append(drawn.choice(allowed))
        if constraint.advance(ids[-1]):
            return text_of(ids)
    return text_of(ids) if len(ids) < most else None


def text_of(ids: Sequence[int]) -> str:
    """The text with special tokens."""
    return tokenizer().decode(list(ids), skip_special_tokens=False)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is allowed and may end there."""
    matcher = grammar.matcher.deep_copy()
    ids = tokenizer().encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def read(name: str, tools: Sequence[Tool], text: str) -> list[ToolCall]:
    """The calls of an answer that has ended, and that is nothing else.

    Read as they are written, a character at a time, they are those that are read when whole.
    """
    plan = ReadingPlan(formats(name).tools, {tool.name: tool for tool in tools})
    whole, held = AnswerReader(plan), AnswerReader(replace(plan, is_held=True))
    events = [*whole.feed(text), *whole.finish(is_cut=False)]
    pieces = [event for char in text for event in held.feed(char)]
    pieces += held.finish(is_cut=False)
    assert not [each for each in (*events, *pieces) if isinstance(each, TextDelta)], text
    assert whole_calls(pieces) == whole_calls(events), text
    assert (held.num_calls, held.num_repeated) == (whole.num_calls, whole.num_repeated)
    assert whole.num_calls + whole.num_repeated <= MAX_CALLS
    return whole_calls(events)


def asked_of(name: str, **changes: Any) -> AnswerGrammar:
    """A grammar of calls in a template's format."""
    asked = AnswerGrammar(Mode.CALLS, ONE_SPACE, formats(name).tools, TOOLS, MAX_CALLS)
    return replace(asked, **changes)


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_every_sampled_call_is_valid(name: str) -> None:
    """In each format; several calls where the format has several."""
    found = formats(name)
    grammar = compiled(asked_of(name), dict(found.special))
    counts = set()
    for seed in range(10):
        text = sampled(grammar, seed)
        assert text is not None
        calls = read(name, TOOLS, text)
        for call in calls:
            tool = next(each for each in TOOLS if each.name == call.name)
            assert jsonschema_rs.is_valid(arguments_schema(tool), dict(call.arguments)), text
        counts.add(min(len(calls), 2))
    assert found.tools is not None
    assert counts == ({1} if found.tools.between is None else {1, 2})


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_text_is_free_until_a_call_begins(name: str) -> None:
    """Under `auto` any text passes, and after the marker only a valid call."""
    found = formats(name)
    assert found.tools is not None
    grammar = compiled(asked_of(name, mode=Mode.TEXT_AND_CALLS), dict(found.special))
    one = compiled(asked_of(name, mode=Mode.TEXT_AND_CALLS, max_calls=1), dict(found.special))
    call = sampled(compiled(asked_of(name, max_calls=1), dict(found.special)), 3)
    assert call is not None
    for text in ("", "Just words, größer.\n", call):
        assert accepts(grammar, text), text
        assert accepts(one, text), text
    broken = call.replace("get_weather", "get_whether", 1)
    assert not accepts(grammar, broken)
    if found.tools.marker:
        assert accepts(grammar, f"Let me see. {call}")
        assert accepts(one, f"Let me see. {call}")
        assert not accepts(one, f"{call} and")


@pytest.mark.parametrize("mode", [Mode.CALLS, Mode.TEXT_AND_CALLS])
@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_an_answer_has_so_many_calls(name: str, mode: Mode) -> None:
    """The answer ends behind the last one, and text between calls changes nothing."""
    found = formats(name).tools
    assert found is not None
    grammar = compiled(asked_of(name, mode=mode), dict(formats(name).special))
    call = sampled(compiled(asked_of(name, max_calls=1), dict(formats(name).special)), 3)
    assert call is not None
    inner = call.removeprefix(found.head).removesuffix(found.tail)
    if found.between is not None:
        for num in (1, MAX_CALLS, MAX_CALLS + 1):
            text = found.head + found.between.join([inner] * num) + found.tail
            assert accepts(grammar, text) == (num <= MAX_CALLS), text
    is_apart = found.close and found.marker in (found.between or "")
    if mode is Mode.TEXT_AND_CALLS and is_apart:
        assert accepts(grammar, f"See. {call} And {call} so.")
        assert accepts(grammar, f"See. {call} And {call} so. {call}")
        assert not accepts(grammar, f"See. {call} And {call} so. {call}.")
    elif mode is Mode.TEXT_AND_CALLS and found.marker:
        assert not accepts(grammar, f"See. {call} And")


def test_a_tool_that_is_not_strict_takes_any_object() -> None:
    """The name is still one of those offered."""
    loose = replace(WEATHER, is_strict=False)
    grammar = compiled(asked_of("hermes", tools=(loose,)), {})
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"a":[1,{"b":null}]}}\n</tool_call>'
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("get_weather", "other"))


def test_calls_or_json() -> None:
    """With a `response_format`, an answer is calls or an object, and nothing else."""
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    grammar = compiled(asked_of("hermes", mode=Mode.CALLS_OR_JSON, answer_schema=schema), {})
    call = '<tool_call>\n{"name": "get_weather_now", "arguments": {}}\n</tool_call>'
    assert accepts(grammar, call)
    assert accepts(grammar, '{"a":1}')
    assert not accepts(grammar, "words")


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_may_come_first(*, special: bool) -> None:
    """Or must, if the prompt has begun it; its markers may be special tokens."""
    reasoning = ReasoningFormat("[TOOL_CALLS]", "[ARGS]") if special else THINK
    ids = dict(tokenizer().special_ids) if special else {}
    call = '<tool_call>\n{"name": "get_weather_now", "arguments": {}}\n</tool_call>'
    asked = asked_of("hermes", reasoning=reasoning)
    thought = f"hm <b> {reasoning.close}\n\n{call}"
    maybe = compiled(replace(asked, thinking=Thinking.MAYBE), ids)
    assert accepts(maybe, call)
    assert accepts(maybe, reasoning.open + thought)
    assert not accepts(maybe, thought)
    begun = compiled(replace(asked, thinking=Thinking.BEGUN), ids)
    assert accepts(begun, thought)
    assert not accepts(begun, call)


NUMBERS = st.integers(-(2**53), 2**53)  # beyond them llguidance rounds
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 500),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 4)),
    st.builds(
        lambda words: {"enum": words},
        st.lists(
            st.one_of(st.text('ab"\\<>\né', max_size=4), NUMBERS, st.booleans()),
            min_size=1, max_size=3, unique_by=repr,
        ),
    ),
)  # fmt: skip


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects of these values, with some of the properties required."""

    def built(properties: dict[str, Any], num: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num],
            "additionalProperties": False,
        }

    names = st.from_regex("[a-z_]{1,6}", fullmatch=True)
    return st.builds(built, st.dictionaries(names, values, max_size=3), st.integers(0, 3))


VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda each: {"type": "array", "items": each, "maxItems": 2}, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    ),
    max_leaves=5,
)
JSON_FORMATS = sorted(
    name
    for name in TOOL_TEMPLATES
    if formats(name).tools.shape in {"json", "named"}  # type: ignore[union-attr]
)


@settings(deadline=None, max_examples=25)
@given(
    schemas=st.lists(objects(VALUES), min_size=1, max_size=3),
    name=st.sampled_from(JSON_FORMATS),
    seed=st.integers(0, 10**6),
)
def test_arguments_of_any_schema_validate(schemas: list[Any], name: str, seed: int) -> None:
    """An independent validator agrees with every call of random tools."""
    tools = [Tool(f"f{index}", None, schema) for index, schema in enumerate(schemas)]
    found = formats(name)
    grammar = compiled(asked_of(name, tools=tools), dict(found.special))
    text = sampled(grammar, seed)
    if text is None:
        return
    calls = read(name, tools, text)
    assert calls
    for call in calls:
        schema = schemas[int(call.name[1:])]
        assert jsonschema_rs.is_valid(schema, dict(call.arguments)), text
