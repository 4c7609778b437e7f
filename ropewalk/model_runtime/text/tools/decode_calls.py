"""Read the calls between a format's markers. A text that is no call gives None."""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ropewalk.model_runtime.text.tools.json_pieces import json_text
from ropewalk.model_runtime.text.tools.tool_format import Tool, ToolCall, ToolFormat

_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_NAME = re.compile(r"\s*([A-Za-z0-9_.-]+)")

Calls = list[ToolCall]


def decode_calls(found: ToolFormat, text: str, tools: Mapping[str, Tool]) -> Calls | None:
    """Return the calls of a text without its marker and close; None if it is no call.

    A call of a name that `tools` has not is none.
    """
    try:
        calls = _DECODERS[found.shape](found, text, tools)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    if not calls or any(call.name not in tools for call in calls):
        return None
    try:
        for call in calls:
            arguments_text(call)
    except ValueError:  # NaN, or a number beyond float
        return None
    return calls


def arguments_text(call: ToolCall) -> str:
    """Return the arguments as JSON, the way OpenAI sends them. Raises ValueError."""
    return json_text(call.arguments)


def is_inside_a_string(found: ToolFormat, text: str) -> bool:
    """Return whether the close came inside a JSON string, so that the call goes on."""
    if found.shape != "json":
        return False
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def _json_calls(found: ToolFormat, text: str, _: Mapping[str, Tool]) -> Calls:
    value = json.loads(text)
    return [_of_object(each, found) for each in (value if isinstance(value, list) else [value])]


def _of_object(value: Any, found: ToolFormat) -> ToolCall:
    name, arguments = value["name"] if isinstance(value, dict) and "name" in value else None, None
    for key in (found.arguments_key, "arguments", "parameters"):
        if isinstance(value, dict) and key in value:
            arguments = value[key]
            break
    return _checked(name, arguments)


def _checked(name: Any, arguments: Any) -> ToolCall:
    if isinstance(arguments, str):  # some models write the arguments as text
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("no name, or no arguments")
    return ToolCall(name, arguments)


def _named_calls(found: ToolFormat, text: str, _: Mapping[str, Tool]) -> Calls:
    """Read name, separator and JSON, which may be repeated with the marker between."""
    calls: Calls = []
    after_marker = found.head.partition(found.marker)[2].strip()
    separators = [part for part in (found.tail.strip(), found.marker, after_marker) if part]
    if found.between:
        separators.insert(0, found.between.strip())
    position = 0
    while text[position:].strip():
        position = _skip(text, position, separators)
        if not text[position:].strip():
            break
        name = _NAME.match(text, position)
        if name is None:
            raise ValueError("no name")
        position = name.end()
        middle = found.middle.strip()
        at = text.find(middle, position) if middle else position
        if at < 0 or text[position:at].strip():
            raise ValueError("no arguments")
        position = at + len(middle)
        position += len(text[position:]) - len(text[position:].lstrip())
        value, position = json.JSONDecoder().raw_decode(text, position)
        calls.append(_checked(name[1], value))
    return calls


def _skip(text: str, position: int, parts: Sequence[str]) -> int:
    """Return the position after whitespace and any of the parts, each once."""
    for part in ("", *parts):
        rest = text[position:].lstrip()
        position = len(text) - len(rest)
        if part and rest.startswith(part):
            position += len(part)
    return position


def _tagged_calls(_: ToolFormat, text: str, tools: Mapping[str, Tool]) -> Calls:
    calls: Calls = []
    position = 0
    while text[position:].strip():
        function = _FUNCTION.match(text, position)
        if function is None:
            raise ValueError("no function")
        name = function[1].strip()
        parameters = (tools[name].parameters if name in tools else None) or {}
        values = {
            each[1].strip(): typed(each[2], schema_of(parameters, each[1].strip()))
            for each in _PARAMETER.finditer(function[2])
        }
        if _PARAMETER.sub("", function[2]).strip():
            raise ValueError("text between parameters")
        calls.append(ToolCall(name, values))
        position = function.end()
    return calls


def schema_of(parameters: Mapping[str, Any], name: str) -> Any:
    properties = parameters.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def is_text(schema: Any) -> bool:
    """Return whether a property is a string and nothing else, written without quotes."""
    if not isinstance(schema, Mapping):
        return False
    if "enum" in schema and all(isinstance(each, str) for each in schema["enum"]):
        return True
    return schema.get("type") == "string" or isinstance(schema.get("const"), str)


def typed(raw: str, schema: Any) -> Any:
    """Return a value between tags: a string as it is, anything else as JSON if it is JSON."""
    if is_text(schema):
        return raw
    try:
        return json.loads(raw)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(raw.strip(), raw)


def _python_calls(_: ToolFormat, text: str, tools: Mapping[str, Tool]) -> Calls:
    with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
        listed = ast.parse(text.strip(), mode="eval").body
    if not isinstance(listed, ast.List):
        raise TypeError("no list")
    calls: Calls = []
    for each in listed.elts:
        if not isinstance(each, ast.Call) or each.args:
            raise TypeError("no call with named arguments")
        name = ast.unparse(each.func)
        arguments = {str(pair.arg): _literal(pair.value) for pair in each.keywords if pair.arg}
        if len(arguments) != len(each.keywords):
            raise TypeError("arguments without a name")
        parameters = (tools[name].parameters if name in tools else None) or {}
        for key, value in arguments.items():
            if isinstance(value, str):  # some models quote every value
                schema = schema_of(parameters, key)
                arguments[key] = value if schema is None else typed(value, schema)
        calls.append(ToolCall(name, arguments))
    return calls


def _literal(node: ast.expr) -> Any:
    """Return a literal's value, in which JSON's words mean what they mean in JSON."""
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)


_JSON_WORDS = {"true": True, "false": False, "null": None}
_DECODERS: Mapping[str, Callable[[ToolFormat, str, Mapping[str, Tool]], Calls]] = {
    "json": _json_calls,
    "named": _named_calls,
    "tagged": _tagged_calls,
    "python": _python_calls,
}
