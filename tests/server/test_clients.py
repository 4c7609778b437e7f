"""Other people's clients, unchanged: openai's, LangChain's, lm-evaluation-harness."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model_runtime.checkpoint import EMBEDDED_MODEL
from tests.processes import Server

MESSAGES: list[Any] = [{"role": "user", "content": "import os\nimport sys\n"}]


def test_openai_sync_and_async_answer_alike(server: Server) -> None:
    """chat and completions, whole and streamed, several at once"""
    options: dict[str, Any] = {"model": "ropewalk-demo", "temperature": 0, "max_tokens": 15}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(messages=MESSAGES, **options)
        text = client.completions.create(prompt="import os\n", **options)

    async def ask() -> tuple[list[str], str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            chats = await asyncio.gather(
                *(client.chat.completions.create(messages=MESSAGES, **options) for _ in range(8))
            )
            stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **options)
            streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
            completion = await client.completions.create(prompt="import os\n", **options)
        contents = [each.choices[0].message.content or "" for each in chats]
        return contents, "".join(streamed), completion.choices[0].text

    contents, streamed, completion = asyncio.run(ask())
    assert set(contents) == {streamed} == {chat.choices[0].message.content}
    assert completion == text.choices[0].text


def test_openai_raises_its_own_errors(server: Server) -> None:
    """with param and code, as applications branch on them"""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(
                model="ropewalk-demo", messages=[{"role": "user", "content": "import os\n" * 1500}]
            )
        assert raised.value.code == "context_length_exceeded"
        assert "maximum context length is 2048 tokens" in str(raised.value)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-9", messages=MESSAGES)


def test_langchain_invokes_streams_and_binds(server: Server) -> None:
    """ChatOpenAI, with what it sends unasked"""
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


TASK = """
task: ropewalk_continuations
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
QUESTIONS = [
    {"text": "import os\nimport", "choices": [" sys", " the", " def"], "label": 0},
    {"text": "def close(self):\n    self.", "choices": ["fp", " 42 is", "close()"], "label": 0},
    {"text": "for i in range", "choices": ["(10):", ": pass", " of it"], "label": 0},
    {"text": "class Error(", "choices": ["Exception):", "1 + 1", "return"], "label": 0},
    {"text": "if x is not", "choices": [" None:", " the", " import"], "label": 0},
    {"text": "try:\n    import", "choices": [" os", " self", ")"], "label": 0},
    {"text": "def __init__(", "choices": ["self", "import", "42"], "label": 0},
    {"text": "    return", "choices": [" self", " and", " os"], "label": 0},
    {"text": "from collections import", "choices": [" namedtuple", " in", " is"], "label": 0},
    {"text": "while True:\n    if", "choices": [" not", " the", "]"], "label": 0},
]


def harness(folder: Path, model: str, arguments: str) -> tuple[dict[str, list[float]], float]:
    """Log-likelihoods by question, and the accuracy, as the harness's command reports them."""
    folder.mkdir()
    data = folder / "test.jsonl"
    data.write_text("\n".join(json.dumps(each) for each in QUESTIONS))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "continuations.yaml").write_text(TASK.replace("DATA", str(data)))
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", model, "--device", "cpu"),
            *("--model_args", arguments, "--tasks", "ropewalk_continuations"),
            *("--include_path", str(folder / "tasks"), "--log_samples"),
            *("--output_path", str(folder / "out")),
        ],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(folder / "hf"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    path = next((folder / "out").rglob("samples_*.jsonl"))
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    found = {
        sample["doc"]["text"]: [float(each[0][0]) for each in sample["resps"]] for sample in samples
    }
    results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())
    return found, results["results"]["ropewalk_continuations"]["acc,none"]


def test_lm_evaluation_harness_scores_as_transformers_does(server: Server, tmp_path: Path) -> None:
    """its `local-completions` model, tokenising through the server"""
    url = f"{server.url}/v1/completions"
    served, accuracy = harness(
        tmp_path / "served", "local-completions", f"model=ropewalk-demo,base_url={url}"
    )
    assert len(served) == len(QUESTIONS) == 10
    for question in QUESTIONS:
        expected = [reference(question["text"], choice) for choice in question["choices"]]
        assert served[question["text"]] == pytest.approx(expected, abs=1e-3)
    likeliest = [max(range(3), key=served[each["text"]].__getitem__) for each in QUESTIONS]
    assert accuracy == sum(best == 0 for best in likeliest) / len(QUESTIONS)
    assert accuracy > 1 / 3, "chance: the echoed logprobs say nothing"


def reference(text: str, continuation: str) -> float:
    """Sum of transformers' logprobs of the continuation's tokens; the harness's split of them."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    whole = tokenizer(text + continuation, add_special_tokens=False)["input_ids"]
    num_context = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    with torch.inference_mode():
        table = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return float(sum(table[at - 1, whole[at]] for at in range(num_context, len(whole))))
