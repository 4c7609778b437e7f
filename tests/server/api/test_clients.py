"""Clients of other projects, unchanged: openai's, LangChain's, lm-evaluation-harness."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import openai
import pytest

from tests.servers.processes import Server, running_server


def test_langchain_invokes_streams_and_binds(server: Server) -> None:
    """ChatOpenAI sends some fields by default."""
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="ropewalk-demo",
        temperature=0,
        max_completion_tokens=12,
        stream_usage=True,
    )
    messages = [SystemMessage("Only Python."), HumanMessage("import os\n")]
    answer = chat.invoke(messages)
    assert isinstance(answer.content, str)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12
    assert answer.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream(messages))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage[-1]["output_tokens"] == 12
    assert [each.content for each in chat.batch([messages] * 3)] == [answer.content] * 3
    first = answer.content[3]
    assert chat.bind(stop=[first]).invoke(messages).content == answer.content.split(first)[0]
    chat.bind(extra_body={"rope": {"policy": "fixed"}}).invoke(messages)
    with pytest.raises(openai.BadRequestError, match=r"rope\.policy.*Given: magic"):
        chat.bind(extra_body={"rope": {"policy": "magic"}}).invoke(messages)


def test_langchain_binds_tools_and_reads_structured_output(server: Server) -> None:
    """`any` becomes required, a schema becomes a named function; the loop goes on."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    digit = Annotated[int, Field(ge=0, le=99)]

    @tool
    def add(a: digit, b: digit) -> int:  # type: ignore[valid-type]
        """Add two numbers."""
        return int(a + b)

    class Colour(BaseModel):
        """A colour."""

        name: str = Field(pattern="^(red|blue)$")
        share: int = Field(ge=0, le=100)

    chat = ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="ropewalk-demo",
        temperature=0,
        max_completion_tokens=150,
    )
    asked = HumanMessage("1 + 2")
    bound = chat.bind_tools([add], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "add"
    assert {type(value) for value in call["args"].values()} == {int}
    streamed = list(bound.stream([asked]))
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole = whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"]
    result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
    ended = chat.bind_tools([add], tool_choice="none").invoke([asked, answer, result])
    assert not ended.tool_calls
    found = chat.with_structured_output(Colour, method="function_calling").invoke("red?")
    assert isinstance(found, Colour)


@pytest.mark.long
def test_lm_evaluation_harness_scores_as_transformers_does(tmp_path: Path) -> None:
    """The harness tokenises through the server, and its `hf` model is the reference.

    Continuations are within the trained length. Needles are in the tier of factor 8, which policy
    grow reads whole prompts by, and `hf` has the same static table.
    """
    with running_server("--rope-policy", "grow") as server:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.server.harness", str(tmp_path), server.url],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    served, own = found["local-completions"], found["hf"]
    num_questions = {"continuations": 10, "needles": 4, "needle_choices": 4}
    assert {task: len(each["answers"]) for task, each in own.items()} == num_questions
    for task, expected in own.items():
        assert served[task]["accuracy"] == expected["accuracy"]
    assert served["needles"]["answers"] == own["needles"]["answers"]
    for task in ("continuations", "needle_choices"):
        for answer, logprobs in zip(served[task]["answers"], own[task]["answers"], strict=True):
            assert answer == pytest.approx(logprobs, abs=1e-3)
    assert served["continuations"]["accuracy"] > 1 / 3, "chance: the echoed logprobs say nothing"
    assert served["needle_choices"]["accuracy"] > 1 / 2, "chance is 1/4"
    assert served["needles"]["accuracy"] > 1 / 2, "without scaling, the model finds none"
