"""Hostile JSON for every field of every body, made from the pydantic models and a seed.

A body is text, not a dictionary: NaN, duplicate keys and a number of 5,000 digits survive.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel

from ropewalk.server.api.completion_schema import CompletionRequest
from ropewalk.server.api.generation_schema import StreamOptions
from ropewalk.server.api.rope_schema import RopeField
from ropewalk.server.api.structured_schema import ResponseFormat, StructuredOutputs
from ropewalk.server.turns.block_schema import ToolResultBlock
from ropewalk.server.turns.chat_schema import ChatRequest, Message, TextPart
from ropewalk.server.turns.item_schema import MessageItem
from ropewalk.server.turns.message_schema import CountTokensRequest, MessagesRequest, OutputConfig
from ropewalk.server.turns.models import DetokenizeRequest, TokenizeRequest
from ropewalk.server.turns.response_schema import ReasoningConfig, ResponsesRequest, TextFormat
from ropewalk.server.turns.tool_schema import CallField, FunctionField, ToolChoice, ToolField

# path -> (model, a body that is answered at once)
ROUTES: Mapping[str, tuple[type[BaseModel], Mapping[str, str]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": '"a"', "max_tokens": "1"}),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": '[{"role": "user", "content": "a"}]', "max_tokens": "1"},
    ),
    "/v1/responses": (ResponsesRequest, {"input": '"a"', "max_output_tokens": "1"}),
    "/v1/messages": (
        MessagesRequest,
        {"messages": '[{"role": "user", "content": "a"}]', "max_tokens": "1"},
    ),
    "/v1/messages/count_tokens": (
        CountTokensRequest,
        {"messages": '[{"role": "user", "content": "a"}]'},
    ),
    "/tokenize": (TokenizeRequest, {"prompt": '"a"'}),
    "/detokenize": (DetokenizeRequest, {"tokens": "[5, 6]"}),
}
_SHARES = (5, 3, 3, 3, 1, 1, 1)  # of the routes among the cases
# Objects inside of bodies, and the fields that hold them.
INNER: Mapping[str, tuple[type[BaseModel], Mapping[str, str], str]] = {
    "rope": (RopeField, {"rope_type": '"yarn"'}, "{}"),
    "stream_options": (StreamOptions, {}, "{}"),
    "response_format": (ResponseFormat, {"type": '"text"'}, "{}"),
    "structured_outputs": (StructuredOutputs, {"whitespace_pattern": '" ?"'}, "{}"),
    "tools": (ToolField, {"type": '"function"', "function": '{"name": "f"}'}, "[{}]"),
    "function": (FunctionField, {"name": '"f"', "parameters": '{"type": "object"}'}, "{}"),
    "tool_choice": (ToolChoice, {"type": '"function"', "function": '{"name": "f"}'}, "{}"),
    "tool_calls": (
        CallField,
        {"id": '"a"', "function": '{"name": "f", "arguments": "{}"}'},
        "[{}]",
    ),
    "messages": (Message, {"role": '"user"', "content": '"a"'}, "[{}]"),
    "input": (MessageItem, {"role": '"user"', "content": '"a"'}, "[{}]"),
    "text": (TextFormat, {"type": '"text"'}, '{"format": {}}'),
    "reasoning": (ReasoningConfig, {"effort": '"low"'}, "{}"),
    "output_config": (OutputConfig, {"effort": '"low"'}, "{}"),
    "system": (
        ToolResultBlock,
        {"type": '"tool_result"', "tool_use_id": '"a"'},
        "[{}]",
    ),
    "content": (TextPart, {"type": '"text"', "text": '"a"'}, "[{}]"),
}
_INT64 = 2**63 - 1
_DEEP = (3, 30, 64, 65, 200, 900, 990, 1100, 5000, 100_000)
_LONG = (257, 513, 2000, 9_000, 70_000, 400_000)
_TEXTS = (
    *('""', '" "', '"\\u0000"', '"a\\u0000b"', '"\\ud800"', '"\\udfff\\ud800"', '"\\ud83d\\ude00"'),
    *('"\\uffff"', '"\\u202e"', '"%s%n{0}{{7*7}}{% raw %}"', '"<|endoftext|>"', '"../../etc"'),
    *('"yarn"', '"longrope"', '"dynamic"', '"linear"', '"grow"', '"by_position"', '"fixed"'),
    *('"default"', '"ropewalk-demo"', '"5"', '"true"', '"1e5"', '"\\"},{\\""', '"\U0001f9f6"'),
)
_NUMBERS = (
    *("0", "-0", "-0.0", "1", "-1", "2", "16", "17", "63", "64", "0.5", "1e-400", "5e-324"),
    *("1e308", "1e309", "-1e999", "1e999", "NaN", "Infinity", "-Infinity", "1E400", "1.0"),
    *(str(_INT64), str(_INT64 + 1), str(-_INT64 - 1), str(-_INT64 - 2), str(2**64), str(2**31)),
    *("9" * 4300, "9" * 4301, "-" + "9" * 5000, "0." + "3" * 5000, "1" + "0" * 400 + "e-400"),
    *("01", "+1", ".5", "1.", "0x10", "1_000", "--1", "1e", "\u0661"),
)
_OTHERS = (
    *("null", "true", "false", "[]", "{}", "[[]]", "[null]", "[{}]", '{"a": 1}', "[1, 2]"),
    *('["a"]', '["a", 5]', '{"": {}}', '{"__proto__": 1}', "undefined", "nul", "True", "'a'", ""),
    *('{"type": "object"}', '{"5": 100}', '{"5": -101}', '{"99999999999999999": 1}', '{"-1": 0}'),
)


def nested(depth: int, rng: Random) -> str:
    """JSON of so many levels, closed or not."""
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"prompt":', "}]")])
    return opening * depth + "1" + (closing * depth if rng.random() < 0.7 else "")


def long_text(rng: Random) -> str:
    """A long string of one of many alphabets."""
    unit = rng.choice(["a", "ab ", "\u00e9", "\U0001f9f6", "\\u0000", "\\ud800", "\\n", "<s>", "1"])
    return '"' + unit * (rng.choice(_LONG) // len(unit)) + '"'


def long_list(rng: Random) -> str:
    """A list or an object of very many small things."""
    count = rng.choice([5, 17, 65, 129, 1025, 4097, 30_000])
    item = rng.choice(["1", '"a"', "-1", "null", "[]", "1.5", '{"role": "user", "content": "a"}'])
    if rng.random() < 0.3:
        return "{" + ", ".join(f'"{number}": {item}' for number in range(count)) + "}"
    return "[" + ", ".join([item] * count) + "]"


def hostile(rng: Random) -> str:
    """Any JSON value, or text that only resembles one."""
    kinds: tuple[tuple[float, Callable[[], str]], ...] = (
        (5, lambda: rng.choice(_TEXTS)),
        (6, lambda: rng.choice(_NUMBERS)),
        (4, lambda: rng.choice(_OTHERS)),
        (2, lambda: long_text(rng)),
        (1, lambda: long_list(rng)),
        (1, lambda: nested(rng.choice(_DEEP), rng)),
    )
    return rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]()


def metadata(annotation: Any) -> Iterator[Any]:
    """Every limit anywhere inside an annotation."""
    for part in get_args(annotation):
        yield from metadata(part)
    yield from getattr(annotation, "__metadata__", ())


@cache
def limits(model: type[BaseModel]) -> list[tuple[str, str]]:
    """(field, value): at, just below and just above every limit of the model's fields."""
    found: list[tuple[str, str]] = []
    for name, field in model.model_fields.items():
        for limit in _flat([*field.metadata, *metadata(field.annotation)]):
            if isinstance(limit, Ge | Gt | Le | Lt):
                (bound,) = _slots(limit)
                for step in (-1, 0, 1, -1e-9, 1e-9):
                    value = bound + step if isinstance(step, int) else float(bound) + step
                    found.append((name, json.dumps(value)))
            elif isinstance(limit, MaxLen | MinLen):
                (size,) = _slots(limit)
                found += [(name, text) for step in (-1, 0, 1) for text in _of_len(size + step)]
    return found


def _flat(parts: list[Any]) -> Iterator[Any]:
    """The metadata, flattened, because pydantic keeps some limits inside of a FieldInfo."""
    for part in parts:
        if hasattr(part, "metadata"):
            yield from _flat(part.metadata)
        else:
            yield part


def _slots(limit: Any) -> tuple[Any, ...]:
    return tuple(getattr(limit, name) for name in type(limit).__dataclass_fields__)


def _of_len(size: int) -> list[str]:
    """Text, ids, texts and a bias of that length."""
    size = max(size, 0)
    bias = {str(number): 1 for number in range(size)}
    return [json.dumps(each) for each in ("a" * size, [5] * size, ["a"] * size, bias)]


@dataclass(frozen=True, slots=True)
class Body:
    """A body, the path it goes to, and the kind of its attack."""

    kind: str
    path: str
    content: bytes


def body(rng: Random) -> Body:
    """One body: mostly right, and wrong in a few places."""
    path = rng.choices(list(ROUTES), _SHARES)[0]
    model, base = ROUTES[path]
    fields = dict(base)
    kind = rng.choices(["field", "limit", "inner", "unknown", "text"], [5, 3, 2, 1, 3])[0]
    for _ in range(rng.choice([1, 1, 2, 3])):
        if kind == "limit":
            name, fields[name] = rng.choice(limits(model) or [("prompt", '""')])
        elif kind == "inner":
            name = rng.choice(list(INNER))
            fields[name] = _inner(name, rng)
        elif kind == "unknown":
            fields[_name(rng)] = hostile(rng)
        else:
            fields[rng.choice(list(model.model_fields))] = hostile(rng)
    text = _written(fields, rng)
    content = text.encode("utf-8", "surrogatepass")
    return Body(kind, path, _spoiled(content, rng) if kind == "text" else content)


def _inner(name: str, rng: Random) -> str:
    model, base, form = INNER[name]
    fields = dict(base)
    around = limits(model)
    if around and rng.random() < 0.4:
        field, fields[field] = rng.choice(around)
    else:
        names = [*model.model_fields, _name(rng)]
        fields[rng.choice(names)] = hostile(rng)
    return form.replace("{}", _written(fields, rng))


def _name(rng: Random) -> str:
    """A field that does not exist; written without its quotes."""
    names = ["x", "", "\\ud800", "\\u0000", "prompt.x", "a" * 300, "b" * 9000, "c" * 200_000]
    return rng.choice(
        [*names, "\u00e9" * 2000, "\\ud83d\\ude00" * 900, "0", "__class__", "list[str]"]
    )


def _written(fields: Mapping[str, str], rng: Random) -> str:
    pairs = [f'"{name}": {value}' for name, value in fields.items()]
    rng.shuffle(pairs)
    return "{" + ", ".join(pairs) + "}"


def _spoiled(content: bytes, rng: Random) -> bytes:
    """A JSON text, changed in one way that may make it invalid."""
    at = rng.randrange(len(content) + 1)
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: content[:at],
        lambda: (
            content[:at]
            + rng.choice([b"\x00", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80"])
            + content[at:]
        ),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content.decode("utf-8", "replace").encode(rng.choice(["utf-16", "utf-32"])),
        lambda: content + content,
        lambda: content + b"\x00" * rng.choice([1, 5000]),
        lambda: b" \n\t" * rng.choice([1, 30_000]) + content,
        lambda: content[:-1] + b", " + content[1:],  # every key twice
        lambda: content[:-1] + b',"prompt": "b","prompt": 5}',
        lambda: b"",
        lambda: rng.randbytes(rng.choice([1, 50, 3000])),
        lambda: nested(rng.choice(_DEEP), rng).encode(),
        lambda: hostile(rng).encode("utf-8", "surrogatepass"),
        lambda: b"{" + b'"":0,' * 20_000 + content[1:],
    )
    return rng.choice(ways)()
