"""Compile a grammar in a trial process that can be killed; `grammar.py` starts it.

Compilation is one call into a library. In the server, nothing could stop a schema that takes hours,
gigabytes or the whole stack. In this process, the kernel stops it, even if the server has died.
The process imports little, so it starts in about 70 ms.

Standard input: a JSON object of `schema` (text) and `whitespace` (a pattern), with `seconds` and
`max_bytes`. Instead of `schema` there may be `lark` (text) and `parts`, pairs of a label and a
schema within it. They are tried alone first, because a grammar reaches its inner schemas late.
Standard output: the problem of the grammar, empty if it is valid. An exit code other than 0: it
exceeded a limit.
"""

import json
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ropewalk.model_runtime.child_process import (
    limit_memory,
    limit_seconds,
    memory_in_use,
    prepare_limits,
)

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# By the library's figures, a token takes at most about 15 ms of lexing and 3 ms of parsing, and an
# answer 40 MB of states. Measured on ordinary schemas: 10 us with 2,000 tokens, 50 with 128,000.
_LIMITS = LLParserLimits(
    max_items_in_row=50_000,  # same as step_max_items, as each optional property is several
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,  # verbose errors would put grammar and answer into logs
)
# The library's message about a rule, whose last line of an error has the reason.
_WRONG_REGEX = re.compile(r"at [^\n]*: invalid regex .*\nerror: ([^\n]*)", re.DOTALL)
_IN_OTHER_WORDS = {
    "NoExtension": "no text satisfies it",
    "oneOf constraints are not supported": (
        "oneOf needs alternatives of which each excludes the others by its type, or by a string "
        "of a required property. anyOf takes all"
    ),
    "circular references with sibling keys": (
        "a $ref that leads back to itself must stand alone, and below no oneOf that it leads to. "
        "anyOf takes it"
    ),
    "panic": "the schema cannot be compiled",
}
_STACK_BYTES = 512 * 1024  # less than the stack of a server thread
_LONGEST_PROBLEM = 300  # characters


def schema_options(whitespace: str) -> "JsonCompileOptions":
    """Return the library's options for JSON, with a pattern of the whitespace in one place."""
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_pattern": whitespace,
        "coerce_one_of": False,
        "lenient": False,
        # No \u: an escaped key could pass as an additional property.
        "json_allowed_escapes": 'nrbtf\\"',
        "json_allow_general_unicode_escapes": False,
    }


def grammar_of(schema: str, whitespace: str) -> str:
    """Return the grammar of a schema. Raises ValueError if it is none, or too deep.

    `whitespace` is a pattern of the whitespace in one place (`whitespace.py`).
    """
    # The options are applied after the schema's own `x-guidance`, which cannot weaken them.
    grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=schema_options(whitespace))
    return grammar


def matcher_of(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a grammar and compute its first mask; `problem_of` returns its problem, if any."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def problem_of(matcher: LLMatcher) -> str:
    """Return the library's message about a bad schema; empty if it is valid."""
    text = matcher.get_error() if matcher.is_error() else ", ".join(matcher.get_grammar_warnings())
    for beginning, told in _IN_OTHER_WORDS.items():
        if text.startswith(beginning):
            return told
    if found := _WRONG_REGEX.match(text):  # the rest shows the rule around it
        return f"invalid regular expression: {found[1]}"
    return " ".join(text.partition("\n<state>")[0].split())[:_LONGEST_PROBLEM]


def _problem_of(asked: Mapping[str, Any], tokenizer: LLTokenizer) -> str:
    try:
        if "lark" not in asked:
            grammar = grammar_of(asked["schema"], asked["whitespace"])
            return problem_of(matcher_of(grammar, tokenizer))
        for label, schema in asked["parts"]:
            alone = {"schema": schema, "whitespace": asked["whitespace"]}
            if problem := _problem_of(alone, tokenizer):
                return f"{problem} ({label})"
        return problem_of(matcher_of(asked["lark"], tokenizer))
    except ValueError as error:  # not a schema, or too deep
        return str(error)[:_LONGEST_PROBLEM]


class _Bytes:
    """A tokenizer of 256 bytes and an end token; compilation depends on no vocabulary."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> Sequence[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Compile the grammar from standard input."""
    asked: dict[str, Any] = json.load(sys.stdin)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    problems: list[str] = []
    threading.stack_size(_STACK_BYTES)
    prepare_limits()
    limit_seconds(asked["seconds"] + 1)  # the server waits for `seconds`, if it still lives
    in_use = memory_in_use()
    if in_use is not None:  # without Linux, time is the only limit
        limit_memory(in_use + asked["max_bytes"])
    compiling = threading.Thread(target=lambda: problems.append(_problem_of(asked, tokenizer)))
    compiling.start()
    compiling.join()
    if not problems:
        sys.exit(1)  # the thread has printed its error
    sys.stdout.write(problems[0])
