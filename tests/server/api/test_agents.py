"""Agents of other projects, unchanged: real loops of calls with a model that says given texts."""

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import httpx2  # openai's client accepts both; its agents accept no other
import openai
import pytest

from tests.server.api.tools.scripted import Scripted, saying

CALL = '<tool_call>{"name": "look", "arguments": {"city":"Paris"}}</tool_call>'


def client_of(server: Scripted) -> openai.AsyncOpenAI:
    """Openai's client of a scripted server."""
    http = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=server.app), base_url="http://scripted"
    )
    return openai.AsyncOpenAI(
        base_url="http://scripted/v1", api_key="none", max_retries=0, http_client=http
    )


def has_current_agents() -> bool:
    """Whether openai-agents is there in a version that works with openai's client 3."""
    try:
        return int(version("openai-agents").split(".")[1]) >= 23
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not has_current_agents(), reason="needs openai-agents >= 0.23")
def test_openai_agents_run_a_loop_over_their_default_api() -> None:
    """The runner sends items back; /v1/responses is what it uses without being told."""
    import agents

    looked = []

    @agents.function_tool
    def look(city: str) -> str:
        """Look at the weather."""
        looked.append(city)
        return "sun"

    async def run(server: Scripted) -> list[Any]:
        async with client_of(server) as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            agent = agents.Agent(name="a", instructions="Be brief.", tools=[look])
            agent.model = "ropewalk-demo"
            whole = await agents.Runner.run(agent, "Weather?")
            streamed = agents.Runner.run_streamed(agent, "Weather?")
            _ = [event async for event in streamed.stream_events()]
            return [whole, streamed]

    agents.set_tracing_disabled(disabled=True)
    with saying([CALL, "Sunny.", CALL, "Sunny."]) as server:
        for result in asyncio.run(run(server)):
            assert result.final_output == "Sunny."
            kinds = [item.type for item in result.new_items]
            assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert looked == ["Paris", "Paris"]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai_calls_a_tool_and_returns_its_type(api: str) -> None:
    """Typed output is a call of a tool, with `tool_choice` required."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel):
        name: str
        people: int

    ended = CALL.replace("look", "final_result").replace(
        '"city":"Paris"', '"name":"Paris","people":2'
    )
    model_type = OpenAIChatModel if api == "chat" else OpenAIResponsesModel

    async def run(server: Scripted) -> Any:
        async with client_of(server) as client:
            model = model_type("ropewalk-demo", provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, output_type=City, instructions="Be brief.")

            @agent.tool_plain
            def look(city: str) -> str:
                """Look at the weather."""
                return f"sun in {city}"

            return await agent.run("Which?")

    with saying([CALL, ended]) as server:
        result = asyncio.run(run(server))
    assert result.output == City(name="Paris", people=2)
    returned = [
        part.content
        for message in result.all_messages()
        for part in message.parts
        if part.part_kind == "tool-return"
    ]
    assert returned[0] == "sun in Paris"
