"""Blocks of messages: text, thinking, calls, results; and as a chat template reads them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ropewalk.server.api.strict_body import Body, FirstMistakes
from ropewalk.server.turns.tool_schema import CacheControl, call_for_template

ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,128}$", examples=["get_weather"])]
Id = Annotated[str, Field(min_length=1, max_length=256, examples=["toolu_1"])]


class TextBlock(Body):
    """A text."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"citations": (None, [])}

    type: Literal["text"]
    """The type of the block."""
    text: str = Field(examples=["Tell me a story."])
    """The text."""
    cache_control: CacheControl = None
    citations: list[Any] | None = None


class ThinkingBlock(Body):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    """The type of the block."""
    thinking: str = Field(examples=["They ask for a story."])
    """The reasoning."""
    signature: str | None = Field(None, examples=[""])
    """Not checked: answers have an empty one."""


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "caller": (None, {"type": "direct"}),
        "toolset_name": (None,),
    }

    type: Literal["tool_use"]
    """The type of the block."""
    id: Id
    """The id, which its result names."""
    name: ToolName
    """The name of the tool."""
    input: dict[str, Any] = Field(examples=[{"city": "Rome"}])
    """The arguments."""
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True), FirstMistakes]


class ToolResultBlock(Body):
    """The result of a call."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"toolset_name": (None,)}

    type: Literal["tool_result"]
    """The type of the block."""
    tool_use_id: Id
    """The call of an earlier message whose result this is."""
    content: str | TextBlocks | None = Field(None, examples=["sunny"])
    """The result, as a text or as blocks of text."""
    is_error: bool | None = None
    """With true, the text of the result begins with `Error: `. Default: false."""
    cache_control: CacheControl = None
    toolset_name: str | None = None

    @property
    def text(self) -> str:
        told = text_of(self.content or "")
        return f"Error: {told}" if self.is_error else told


_TAGS = {
    "text": "a-text",
    "thinking": "a-thought",
    "tool_use": "a-call",
    "tool_result": "a-result",
}


def _kind_of_block(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _TAGS.get(kind) if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("a-text")]
    | Annotated[ThinkingBlock, Tag("a-thought")]
    | Annotated[ToolUseBlock, Tag("a-call")]
    | Annotated[ToolResultBlock, Tag("a-result")],
    Discriminator(
        _kind_of_block,
        custom_error_type="unusable",
        custom_error_message=(
            f"must be a block whose type is one of {', '.join(_TAGS)}; images, documents and "
            "blocks of built-in tools are not supported"
        ),
    ),
]


class BlockMessage(Body):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    """The speaker."""
    content: str | Annotated[list[Block], Field(fail_fast=True), FirstMistakes] = Field(
        examples=["Tell me a story."]
    )
    """A text, or blocks `text`, `thinking`, `tool_use` and `tool_result`. Images, documents and
    blocks of Anthropic's own tools get 400."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield the first block that this role has not."""
        for index, block in enumerate(self.blocks):
            role = _ROLES.get(block.type, self.role)
            if role != self.role:
                yield f"content.{index}", f"of type {block.type} needs the role {role}"
                return

    @property
    def blocks(self) -> Sequence[Block]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


_ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


def text_of(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def problems_of_results(messages: Sequence[BlockMessage]) -> Iterator[tuple[str, str]]:
    """Yield the first result of a call that no message before it has."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        for block in message.blocks:
            if isinstance(block, ToolUseBlock):
                known.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in known:
                told = f"[{index}]: tool_use_id must name a tool_use before it"
                yield "messages", f"{told}. Given: {block.tool_use_id[:64]!a}"
                return


def messages_for_template(
    system: str | Sequence[TextBlock] | None, messages: Sequence[BlockMessage]
) -> list[dict[str, Any]]:
    """Return the conversation in the shape that chat templates read."""
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": text_of(system)})
    for message in messages:
        if message.role == "assistant":
            found.append(_assistant(message.blocks))
        else:
            found += _given(message)
    return found


def _given(message: BlockMessage) -> Iterator[dict[str, Any]]:
    """Yield the texts between results as messages of their own, in the order of the blocks."""
    texts: list[TextBlock] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": text_of(texts)}
            texts = []
            yield {"role": "tool", "content": block.text, "tool_call_id": block.tool_use_id}
    if texts or not message.blocks:
        yield {"role": message.role, "content": text_of(texts)}


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": text_of(texts)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [
        call_for_template(block.id, block.name, block.input)
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {**message, "tool_calls": calls} if calls else message
