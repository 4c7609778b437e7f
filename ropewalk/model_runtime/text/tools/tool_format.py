"""How a model writes tool calls and reasoning: the markers, and the shape between them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

# json: an object with the name and the arguments, or a list of such objects.
# named: the name, a separator, the arguments as JSON.
# tagged: the name, then each argument between tags of its own.
# python: a list of calls in Python's syntax.
Shape = Literal["json", "named", "tagged", "python"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text of calls: `head` call (`between` call)* `tail`, a call: name `middle` arguments.

    `marker` is the beginning of `head` that no ordinary text has, and `close` the end of `tail`. An
    empty marker: an answer is a call if it begins as one. An empty close: calls run to the end.
    """

    name: str
    shape: Shape
    head: str
    middle: str
    between: str | None  # None: an answer has one call at most
    tail: str
    marker: str
    close: str
    arguments_key: str = "arguments"  # of the shape json
    in_template: bool = True  # False: the instructions about tools are ours (`instructions.py`)

    def texts(self) -> tuple[str, ...]:
        """Return the literal parts, in which special tokens are looked for."""
        return (self.head, self.middle, self.between or "", self.tail)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around a model's reasoning."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None  # JSON schema; None: the function has no arguments
    is_strict: bool = True  # the arguments are held to the schema
    is_exact: bool = False  # a keyword that no grammar keeps is refused, not left out
    field: str = "tools"  # of the request, for errors of the schema

    def for_template(self) -> dict[str, Any]:
        """Return it in OpenAI's shape, which chat templates read.

        Templates read the description and the parameters without asking whether they exist.
        """
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description or "",
                "parameters": self.parameters or {"type": "object", "properties": {}},
            },
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made."""

    name: str
    arguments: Mapping[str, Any]


def _json_format(
    name: str, marker: str, close: str, arguments_key: str = "arguments"
) -> ToolFormat:
    between = None
    if marker:
        between = "}" + f"{close}\n{marker}" + '{"name": "'
    return ToolFormat(
        name=name,
        shape="json",
        head=marker + '{"name": "',
        middle=f'", "{arguments_key}": ',
        between=between,
        tail="}" + close,
        marker=marker.strip(),
        close=close.strip(),
        arguments_key=arguments_key,
    )


# Served with instructions of our own if the chat template knows no tools.
GENERIC = ToolFormat(
    name="generic",
    shape="json",
    head='<tool_call>{"name": "',
    middle='", "arguments": ',
    between='}</tool_call>\n<tool_call>{"name": "',
    tail="}</tool_call>",
    marker="<tool_call>",
    close="</tool_call>",
    in_template=False,
)
# Formats that an operator may name. Sources: the chat templates of Qwen2.5, Qwen3-Coder,
# Mistral-7B-Instruct-v0.3, Llama 3.1 and Llama 4 on the hub.
KNOWN_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        _json_format("hermes", "<tool_call>\n", "\n</tool_call>"),
        ToolFormat(
            name="mistral",
            shape="json",
            head='[TOOL_CALLS][{"name": "',
            middle='", "arguments": ',
            between='}, {"name": "',
            tail="}]",
            marker="[TOOL_CALLS]",
            close="",
        ),
        _json_format("llama-json", "", "", "parameters"),
        ToolFormat(
            name="qwen3-coder",
            shape="tagged",
            head="<tool_call>\n<function=",
            middle=">\n",
            between="</function>\n</tool_call>\n<tool_call>\n<function=",
            tail="</function>\n</tool_call>",
            marker="<tool_call>",
            close="</tool_call>",
        ),
        ToolFormat(
            name="pythonic",
            shape="python",
            head="[",
            middle="(",
            between="), ",
            tail=")]",
            marker="",
            close="",
        ),
        GENERIC,
    )
}
# Markers of reasoning that chat templates have.
REASONING_FORMATS = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
)


def known_name(found: ToolFormat) -> str:
    """Return the name of a known format with the same marker and shape, or `template`."""
    for known in KNOWN_FORMATS.values():
        same = (known.shape, known.marker, known.arguments_key)
        if known.in_template and same == (found.shape, found.marker, found.arguments_key):
            return known.name
    return "template"


def special_ids(texts: Iterator[str], special: Mapping[str, int]) -> dict[str, int]:
    """Return the special tokens that occur in some texts, which a decoder would leave out."""
    joined = "\n".join(texts)
    return {text: token_id for text, token_id in special.items() if text and text in joined}
