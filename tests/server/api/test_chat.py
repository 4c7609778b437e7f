"""/v1/chat/completions over a real socket, through openai's own client."""

import concurrent.futures
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.server.api.asking import asked, tokens_of
from tests.servers.openai_client import openai_client_of
from tests.servers.processes import Server, running_server, without_replicas

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}# {{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if shout %}# LOUD\n{% endif %}{% if add_generation_prompt %}# assistant:"
    "{% endif %}{% if 'BOOM' in messages[0].content %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)
MESSAGES: list[Any] = [
    {"role": "system", "content": "Only Python."},
    {"role": "user", "content": "import os\nimport sys\n\ndef "},
]
GREEDY: dict[str, Any] = {"temperature": 0, "messages": MESSAGES}


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over a model whose tokenizer has a template of its own."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    arguments = ["--allowed-chat-template-kwargs", "shout,whisper"]
    arguments += ["--rope-scaling", '{"rope_type": "yarn", "factor": 8}']
    with running_server(str(folder), *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over a model whose tokenizer has no template."""
    folder = tmp_path_factory.mktemp("models") / "bare"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "chat_template.jinja").unlink()
    with running_server(str(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def chatty(templated: Server) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the server whose model has a template."""
    with openai_client_of(templated) as made:
        yield made


def prompt_ids(**options: Any) -> list[int]:
    """The token ids that transformers makes of the messages."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    settings = {"add_generation_prompt": True, "return_dict": False, **options}
    found: list[int] = tokenizer.apply_chat_template(MESSAGES, chat_template=TEMPLATE, **settings)
    return found


def test_messages_become_transformers_prompt(chatty: openai.OpenAI) -> None:
    """The answer equals that of the completions route over the same tokens."""
    chat = chatty.chat.completions.create(model="chatty", max_tokens=20, **GREEDY)
    ids = prompt_ids()
    same = chatty.completions.create(model="chatty", prompt=ids, max_tokens=20, temperature=0)
    assert chat.choices[0].message.content == same.choices[0].text
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].finish_reason == "length"
    assert chat.object == "chat.completion"
    assert chat.id.startswith("chatcmpl-")
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(ids)
    assert chat.choices[0].model_extra["rope"]["rope_type"] == "default"  # type: ignore[index]


def test_a_stream_says_what_the_whole_answer_says(chatty: openai.OpenAI) -> None:
    """The role comes once; the pieces, the logprobs and the usage are compared."""
    options: dict[str, Any] = {
        **GREEDY, "model": "chatty", "max_tokens": 25, "logprobs": True, "top_logprobs": 2, "n": 2,
    }  # fmt: skip
    whole = chatty.chat.completions.create(**options, extra_body={"cache_salt": "whole"})
    chunks = list(
        chatty.chat.completions.create(
            **options,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": "streamed"},
        )
    )
    for index in range(2):
        choices = [each for chunk in chunks for each in chunk.choices if each.index == index]
        expected = whole.choices[index]
        assert "".join(each.delta.content or "" for each in choices) == expected.message.content
        assert [each.delta.role for each in choices] == ["assistant"] + [None] * 24
        assert choices[-1].finish_reason == expected.finish_reason
        entries = [entry for each in choices for entry in each.logprobs.content]  # type: ignore[union-attr]
        assert entries == expected.logprobs.content  # type: ignore[union-attr]
    assert chunks[-1].usage == whole.usage
    assert chunks[0].object == "chat.completion.chunk"


def test_logprobs_have_the_chat_shape(chatty: openai.OpenAI) -> None:
    """The numbers and alternatives are those of the completions route."""
    chat = chatty.chat.completions.create(
        model="chatty", max_tokens=8, logprobs=True, top_logprobs=3, **GREEDY
    )
    classic = chatty.completions.create(
        model="chatty", prompt=prompt_ids(), max_tokens=8, temperature=0, logprobs=3
    )
    entries = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries is not None
    expected = classic.choices[0].logprobs
    assert expected is not None
    assert [entry.logprob for entry in entries] == expected.token_logprobs
    assert [entry.token for entry in entries] == expected.tokens
    for entry in entries:
        assert entry.bytes is not None
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
    bare = chatty.chat.completions.create(model="chatty", max_tokens=2, logprobs=True, **GREEDY)
    assert [each.top_logprobs for each in bare.choices[0].logprobs.content] == [[], []]  # type: ignore[union-attr]


def test_template_variables_reach_the_template(chatty: openai.OpenAI) -> None:
    """A variable that the operator allows reaches the template."""
    answer = chatty.chat.completions.create(
        model="chatty",
        max_tokens=2,
        **GREEDY,
        extra_body={"chat_template_kwargs": {"shout": True}},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_ids(shout=True)) > len(prompt_ids())


def test_a_final_message_can_be_continued(chatty: openai.OpenAI) -> None:
    """The prompt ends inside the assistant's turn."""
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": "close(self):"}]
    answer = chatty.chat.completions.create(
        model="chatty",
        max_tokens=5,
        temperature=0,
        messages=messages,
        extra_body={"continue_final_message": True},
    )
    text = "".join(f"# {each['role']}: {each['content']}\n" for each in messages).rstrip()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    ids = tokenizer(tokenizer.bos_token + text, add_special_tokens=False)["input_ids"]
    same = chatty.completions.create(model="chatty", prompt=ids, max_tokens=5, temperature=0)
    assert answer.choices[0].message.content == same.choices[0].text


def test_developer_is_system_and_parts_are_joined(chatty: openai.OpenAI) -> None:
    """`developer` is OpenAI's newer name of the system role."""

    def num_prompt_tokens(messages: list[Any]) -> int:
        answer = chatty.chat.completions.create(model="chatty", messages=messages, max_tokens=1)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    plain = num_prompt_tokens([{"role": "system", "content": "a\nb"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert num_prompt_tokens([{"role": "developer", "content": parts}]) == plain


@without_replicas
def test_a_model_without_a_template_gets_a_transcript(bare: Server) -> None:
    """The answer stops before the user's next turn."""
    body = {**GREEDY, "max_tokens": 4}
    answer = asked(bare, "chat/completions", **body)
    text = f"System: {MESSAGES[0]['content']}\nUser: {MESSAGES[1]['content']}\nAssistant:"
    same = asked(bare, "completions", prompt=text, max_tokens=4, temperature=0)
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    ids = tokens_of(bare, "\nUser:", add_special_tokens=False)
    told = {**body, "max_tokens": 40, "logit_bias": {str(ids[-1]): 100}}
    forced = {**told, "stop": ["never"], "messages": [{"role": "user", "content": "\nUser"}]}
    answer = asked(bare, "chat/completions", **forced)
    assert "\nUser:" not in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1"),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages.0.tool_call_id",
            "is missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
            "must be text; images",
        ),
        ({"messages": ["a"]}, "messages.0", 'must be an object. Given: "a"'),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "Unicode"),
        ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs`"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1. Given: 0"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "differs from"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "is missing"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
            "may contain shout",
        ),
        ({"chat_template_kwargs": {"whisper": 1}}, "chat_template_kwargs", "is not read by"),
        ({"continue_final_message": True}, "continue_final_message", "of the assistant"),
        (
            {"min_tokens": 5000},
            "min_tokens",
            "must be <= the answer's room in the longest context (",
        ),
        ({"messages": [{"role": "user", "content": "a" * 10**6}]}, "messages", "characters"),
        ({"thinking": {}}, "thinking", "use `reasoning_effort`"),
        ({"store": True}, "store", "must be false, or left out. Given: true"),
        (
            {"messages": [{"role": "assistant", "content": " "}], "continue_final_message": True},
            "continue_final_message",
            "that says something",
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages.0.tool_calls.0.id",
            "is missing",
        ),
    ],
)
def test_a_field_is_used_or_refused(
    templated: Server, change: dict[str, Any], param: str, message: str
) -> None:
    """A refusal names the field in OpenAI's envelope."""
    import json

    body = json.dumps({**GREEDY, **change})
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(
        f"{templated.url}/v1/chat/completions", content=body, headers=headers, timeout=30
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_template_that_loops_on_a_message_ends_that_chat_only(templated: Server) -> None:
    """Other chats wait for their time, and completions do not."""

    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{templated.url}{path}", json=body, timeout=120)

    boom = {"model": "chatty", "messages": [{"role": "user", "content": "BOOM"}]}
    chat = "/v1/chat/completions"
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        hostile = [pool.submit(post, path, **boom) for path in ("/tokenize", chat)]
        others = [pool.submit(post, chat, messages=MESSAGES, max_tokens=2)]
        others += [pool.submit(post, "/v1/completions", prompt="import os", max_tokens=2)]
    assert [each.result().status_code for each in others] == [200, 200]
    for refused in [each.result() for each in hostile]:
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "messages")
        assert "template takes more than 2 seconds of processor time" in error["message"]
