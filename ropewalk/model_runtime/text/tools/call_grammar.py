"""Grammars of answers with tool calls and reasoning, in llguidance's form of Lark.

A rule for free text ends lazily at a marker. After the marker only an offered name and arguments
that satisfy its schema are allowed. Special tokens are written as `<[id]>`, because text in a
grammar matches no special token.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ropewalk.model_runtime.text.grammar_trial import schema_options
from ropewalk.model_runtime.text.tools.argument_schema import arguments_schema, is_text
from ropewalk.model_runtime.text.tools.tool_format import ReasoningFormat, Tool, ToolFormat


class Mode(Enum):
    """The parts that an answer may have."""

    TEXT_AND_CALLS = 1
    CALLS = 2
    CALLS_OR_JSON = 3
    JSON = 4


class Thinking(Enum):
    """Whether reasoning comes before the rest."""

    NO = 1
    MAYBE = 2
    BEGUN = 3  # the prompt ends with the opening marker


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """All that a grammar of an answer depends on."""

    mode: Mode
    whitespace: str  # pattern of the whitespace in one place of JSON
    tool_format: ToolFormat | None = None
    tools: Sequence[Tool] = ()
    max_calls: int = 1
    answer_schema: str | None = None  # JSON schema as text, of the modes with JSON
    answer_rule: str | None = None  # instead of a schema: a rule of a text that is no JSON
    reasoning: ReasoningFormat | None = None
    thinking: Thinking = Thinking.NO

    def lark(self, special: Mapping[str, int]) -> str:
        """Return the grammar over a vocabulary in which these texts are special tokens."""
        return _Writer(self, special).written()

    def for_one(self, tool: Tool) -> "AnswerGrammar":
        """Return the grammar of calls of one tool, to find out whose schema is wrong."""
        return replace(self, mode=Mode.CALLS, tools=[tool], thinking=Thinking.NO)


class _Writer:
    """The rules of one grammar."""

    def __init__(self, asked: AnswerGrammar, special: Mapping[str, int]) -> None:
        self._asked = asked
        self._special = special
        pattern: str = "|".join(re.escape(each) for each in sorted(special, key=len, reverse=True))
        self._split = re.compile(f"({pattern})") if special else None
        self._rules: list[str] = []

    def written(self) -> str:
        """Return the whole grammar."""
        asked, rules = self._asked, self._rules
        thinking = self._thinking()
        if asked.mode is Mode.TEXT_AND_CALLS:
            body = self._text_and_calls()
        else:
            calls = [] if asked.mode is Mode.JSON else [self._calls(asked.max_calls)]
            body = " | ".join([*calls, *(["answer"] if asked.mode is not Mode.CALLS else [])])
        if asked.mode in {Mode.JSON, Mode.CALLS_OR_JSON}:
            answer = asked.answer_rule
            if answer is None:
                assert asked.answer_schema is not None
                answer = self._json(json.loads(asked.answer_schema))
            rules.append(f"answer: {answer}")
        head = ["%llguidance {}", f"start: {thinking}body", f"body: {body}"]
        return "\n".join([*head, *rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{0,4}/"]) + "\n"

    def _thinking(self) -> str:
        """Return the beginning of `start`, with its space behind it."""
        reasoning = self._asked.reasoning
        if reasoning is None or self._asked.thinking is Thinking.NO:
            return ""
        self._rules.append(f"reasoned: {self._until(reasoning.close, 'reasoned')} SPACE")
        if self._asked.thinking is Thinking.BEGUN:
            return "reasoned "
        self._rules.append(f"thought: {self._literal(reasoning.open)} reasoned")
        return "thought? "

    def _until(self, marker: str, rule: str) -> str:
        """Return free text up to and with a marker."""
        first = self._split.match(marker) if self._split is not None else None
        if first is not None:
            return f"TEXT {self._literal(marker)}"
        self._rules.append(f"{rule}_marker[lazy]: TEXT {json.dumps(marker, ensure_ascii=False)}")
        return f"{rule}_marker"

    def _text_and_calls(self) -> str:
        found = self._asked.tool_format
        assert found is not None
        # Whether calls have blocks of their own, which text may follow.
        is_apart = bool(found.close) and found.marker in (found.between or found.marker)
        max_calls = self._asked.max_calls
        calls = self._calls(1 if is_apart else max_calls, after_marker=bool(found.marker))
        if not found.marker:
            begins = r"\s*".join(re.escape(each) for each in re.findall(r"\S+", found.head))
            begins = begins.replace("/", r"\/").replace(r"\ ", " ")
            self._rules.append(rf"OTHER: /(.|\n)*/ & ~/(?s:\s*{begins}.*)/")
            return f"{calls} | OTHER"
        self._rules.append(f"tag: {self._until(found.marker, 'tag')} {calls}")
        # The answer ends behind the last call, because text there could be more calls.
        before = f"tag{{0,{max_calls - 1}}} " if is_apart and max_calls > 1 else ""
        return f"{before}(TEXT | tag)"

    def _calls(self, max_calls: int, *, after_marker: bool = False) -> str:
        """Return one or several calls, with or without the marker that they begin with."""
        found = self._asked.tool_format
        assert found is not None
        head = found.head
        if after_marker:
            head = head.partition(found.marker)[2]
        more = ""
        if max_calls > 1 and found.between is not None:
            more = f" ({self._literal(found.between)} call){{0,{max_calls - 1}}}"
        for index, tool in enumerate(self._asked.tools):
            called = self._literal(tool.name + found.middle)
            self._rules.append(f"call_{index}: {called} {self._arguments(index, tool)}")
        names = " | ".join(f"call_{index}" for index in range(len(self._asked.tools)))
        self._rules.append(f"call: {names}")
        return f"{self._literal(head)} call{more} {self._literal(found.tail)}"

    def _arguments(self, index: int, tool: Tool) -> str:
        found = self._asked.tool_format
        assert found is not None
        schema = arguments_schema(tool)
        if found.shape == "tagged":
            return self._tagged(index, schema)
        if found.shape == "python":
            return self._python(index, schema)
        return self._json(schema)

    def _properties(self, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """Return name, schema and whether it is required, for formats that name each argument."""
        properties = schema.get("properties")
        required = schema.get("required", ())
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return [
            (name, {**each, **definitions} if isinstance(each, dict) else each, name in required)
            for name, each in (properties if isinstance(properties, dict) else {}).items()
        ]

    def _tagged(self, index: int, schema: Mapping[str, Any]) -> str:
        parts = []
        for at, (name, value, is_required) in enumerate(self._properties(schema)):
            rule, close = f"value_{index}_{at}", "\n</parameter>\n"
            if is_text(value) and "enum" not in value:
                content = self._until(close, rule)
            elif is_text(value):
                options = " | ".join(self._literal(each) for each in value["enum"])
                content = f"({options}) {self._literal(close)}"
            else:
                content = f"{self._json(value)} {self._literal(close)}"
            self._rules.append(
                f"{rule}: {self._literal(f'<parameter={name}>' + chr(10))} {content}"
            )
            parts.append(rule if is_required else f"{rule}?")
        return " ".join(parts)

    def _python(self, index: int, schema: Mapping[str, Any]) -> str:
        """Return named arguments in the schema's order, the required ones first.

        The values are JSON, whose words the reader knows.
        """
        found = sorted(self._properties(schema), key=lambda each: not each[2])
        rules = []
        for at, (name, value, is_required) in enumerate(found):
            rule = f"value_{index}_{at}"
            self._rules.append(f"{rule}: {self._literal(name + '=')} {self._json(value)}")
            rules.append((rule, is_required))
        # Each rule may end the list; a comma comes before all but the first.
        rest, comma = "", self._literal(", ")
        for at in range(len(rules) - 1, -1, -1):
            rule, is_required = rules[at]
            follows = f" ({comma} {rest})" if rest else ""
            if rest and not rules[at + 1][1]:
                follows += "?"
            here = f"{rule}{follows}"
            self._rules.append(
                f"from_{index}_{at}: {here}{'' if is_required or not rest else f' | {rest}'}"
            )
            rest = f"from_{index}_{at}"
        if not rules:
            return ""
        return rest if rules[0][1] else f"{rest}?"

    def _json(self, schema: Any) -> str:
        """Return a JSON value under a schema; the options go with it."""
        if not isinstance(schema, Mapping):
            schema = {} if schema else {"enum": []}
        options = schema_options(self._asked.whitespace)
        return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)

    def _literal(self, text: str) -> str:
        """Return text of which special tokens are written as such."""
        parts = [text] if self._split is None else self._split.split(text)
        written = [
            f"<[{self._special[part]}]>"
            if part in self._special
            else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(written)
