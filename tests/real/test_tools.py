"""A tool's loop with a real checkpoint: the model calls, the tool answers, the model ends."""

import json

import openai
import pytest

from tests.openai_client import openai_client_of
from tests.processes import Server

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
        },
    },
}


def test_the_model_calls_a_tool_and_ends(served: Server) -> None:
    """The forced call is valid JSON of the schema; the second answer is text that ends."""
    messages: list[object] = [{"role": "user", "content": "How is the weather in Paris?"}]
    with openai_client_of(served) as client:

        def ask(**fields: object) -> openai.types.chat.chat_completion.Choice:
            answer = client.chat.completions.create(
                model="smollm2",
                messages=messages,
                tools=[WEATHER],
                temperature=0,
                max_tokens=80,
                **fields,
            )
            return answer.choices[0]

        choice = ask(tool_choice="required", parallel_tool_calls=False)
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city"}
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 24 C"})
        ended = ask(tool_choice="none")
        assert ended.finish_reason in {"stop", "length"}
        assert ended.message.content
        assert ended.message.tool_calls is None
