"""A schema compiled for trial, in a process that can be killed; `grammar.py` runs this file.

Compiling is one call into a library: in the server nothing could end a schema that takes hours,
gigabytes or the whole stack. Here the kernel does, whatever becomes of the server. The file
imports nothing of ours, so that the process is there in some 70 ms.

Standard input: a JSON object of `schema` (text), `seconds` and `max_bytes`. Standard output: what
is wrong with the schema, nothing if it is good. An exit code other than 0: it was too much.
"""

import json
import math
import resource
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# By the library's figures at most some 15 ms of lexing and 3 ms of parsing for a token, and 40 MB
# of states for an answer. Measured on ordinary schemas: 10 us with 2,000 tokens, 50 with 128,000.
_LIMITS = LLParserLimits(
    max_items_in_row=50_000,  # as many as a step may have: each optional property is several
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,  # they would show grammar and answer in logs
)
_STACK_BYTES = 512 * 1024  # less than a thread of the server has
_LONGEST_PROBLEM = 300  # characters


def matcher_of(schema: str, tokenizer: LLTokenizer) -> LLMatcher:
    """The compiled schema, with its first mask computed; `problem_of` says whether it is good."""
    grammar = LLMatcher.grammar_from_json_schema(
        schema,
        # After the schema's own `x-guidance`, so that it cannot weaken anything.
        overrides={
            "item_separator": ",",
            "key_separator": ":",
            # JSON's, but a model that likes it too much gets on.
            "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
            "coerce_one_of": False,
            "lenient": False,
            # No \u: under another spelling a key could pass for an additional property.
            "json_allowed_escapes": 'nrbtf\\"',
            "json_allow_general_unicode_escapes": False,
        },
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def problem_of(matcher: LLMatcher) -> str:
    """What is wrong with a schema, in the library's words; empty if nothing is."""
    text = matcher.get_error() if matcher.is_error() else ", ".join(matcher.get_grammar_warnings())
    if text.startswith("NoExtension"):
        return "no text satisfies it"
    return " ".join(text.partition("\n<state>")[0].split())[:_LONGEST_PROBLEM]


def _problem_of_schema(schema: str, tokenizer: LLTokenizer) -> str:
    try:
        return problem_of(matcher_of(schema, tokenizer))
    except ValueError as error:  # what is no schema at all, or too deep
        return str(error)[:_LONGEST_PROBLEM]


class _Bytes:
    """A tokenizer of 256 bytes and an end token: compiling depends on no vocabulary."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> Sequence[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _limit(seconds: float, max_bytes: int) -> None:
    """Processor time, memory beyond what the process has now, and no core file."""
    most_s = math.ceil(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.is_file():  # elsewhere than on Linux time is the only limit
        most = int(statm.read_text().split()[5]) * resource.getpagesize() + max_bytes
        # Not RLIMIT_AS: malloc reserves 128 MiB of addresses for a thread, which cost nothing.
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> None:
    """Compile what stands on standard input."""
    asked: dict[str, Any] = json.load(sys.stdin)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    problems: list[str] = []
    threading.stack_size(_STACK_BYTES)
    _limit(asked["seconds"], asked["max_bytes"])
    compiling = threading.Thread(
        target=lambda: problems.append(_problem_of_schema(asked["schema"], tokenizer))
    )
    compiling.start()
    compiling.join()
    if not problems:
        sys.exit(1)  # the thread has printed why
    sys.stdout.write(problems[0])


if __name__ == "__main__":
    main()
