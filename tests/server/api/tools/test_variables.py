"""Fields that become variables of a chat template, and fields that it does not read."""

from typing import Any

from tests.server.api.tools.scripted import saying
from tests.servers.tool_templates import HERMES, NO_TOOLS

EFFORT = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"
SWITCH = EFFORT.replace("reasoning_effort", "enable_thinking")
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def test_an_effort_that_no_variable_may_take_is_refused() -> None:
    """The sentence names the variable and the operator's setting; null asks for nothing."""
    for template, name in ((EFFORT, "reasoning_effort"), (SWITCH, "enable_thinking")):
        with saying("Yes.", template, allowed_chat_template_kwargs=()) as server:
            for path in ("/v1/chat/completions", "/tokenize"):
                body = dict(BODY) if path != "/tokenize" else {"messages": BODY["messages"]}
                refused = server.post(path, {**body, "reasoning_effort": "none"})
                assert refused.status_code == 400, refused.text
                error = refused.json()["error"]
                assert error["param"] == "reasoning_effort"
                assert f"sets {name} of" in error["message"]
                assert "allowed_chat_template_kwargs" in error["message"]
                assert server.post(path, {**body, "reasoning_effort": None}).status_code == 200
        with saying("Yes.", template, allowed_chat_template_kwargs=(name,)) as server:
            answer = server.post("/v1/chat/completions", {**BODY, "reasoning_effort": "none"})
            assert answer.status_code == 200, answer.text


def test_null_does_not_replace_a_special_token() -> None:
    """The variables of the server itself stay as they are."""
    template = "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    nulls = {"chat_template_kwargs": {"eos_token": None, "bos_token": None, "messages": None}}
    messages = {"messages": BODY["messages"]}
    with saying("Yes.", template) as server:
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            plain, given = (server.post(path, each) for each in (messages, {**messages, **nulls}))
            assert plain.status_code == 200, plain.text
            assert given.json() == plain.json()


def test_a_name_that_the_template_does_not_read_changes_nothing() -> None:
    """As with OpenAI and vLLM."""
    named = {"messages": [{"role": "user", "content": "a", "name": "b"}]}
    with saying("Yes.") as server:
        plain = server.post("/tokenize", {"messages": BODY["messages"]}).json()
        assert server.post("/tokenize", named).json() == plain
    with saying("Yes.", "{{ messages[0].name }}: {{ messages[0].content }}") as server:
        assert server.post("/tokenize", named).json()["count"] == len("b: a")


def test_a_template_has_stop_strings_beside_as_many_as_a_request_may_name() -> None:
    """The plain transcript of a model without a chat template has a stop string of its own."""
    with saying("Hello.") as server:
        assert server.ask(stop=["xy"] * 64).choices[0].message.content == "Hello."
        asked = {"messages": [{"role": "user", "content": "Hi."}], "stop": ["x"] * 65}
        error = server.post("/v1/chat/completions", asked).json()["error"]
    assert error["message"].startswith("`stop` must ")
    assert "at most 64 items" in error["message"]


def test_named_templates_are_those_of_tools_and_documents() -> None:
    """A token is a byte of the text, so their number tells the template."""
    chat: dict[str, Any] = {"messages": BODY["messages"]}
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    documents = {"documents": [{"title": "b", "pages": [1]}]}
    rag = "{{ documents | tojson }}{{ messages[0].content }}"
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    with saying(call, NO_TOOLS, named={"tool_use": HERMES, "rag": rag}) as server:
        text = server.post("/tokenize", {**chat, **documents}).json()
        assert text["count"] == len('[{"title": "b", "pages": [1]}]a')
        answer = server.post("/v1/chat/completions", {**BODY, **documents}).json()
        assert answer["usage"]["prompt_tokens"] == text["count"]
        both = server.post("/v1/chat/completions", {**chat, **tools, **documents})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "documents")
        asked = {**chat, **tools, "max_tokens": 99, "temperature": 0}
        called = server.post("/v1/chat/completions", asked).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls", called
        with_tools = server.post("/tokenize", {**chat, **tools}).json()
        prompt = server.post("/detokenize", {"tokens": with_tools["tokens"]}).json()["prompt"]
        assert prompt.startswith("<tools>")


def test_documents_that_no_template_reads_are_refused() -> None:
    """They would be lost in silence; no documents are none to lose."""
    with saying("Yes.", NO_TOOLS) as server:
        refused = server.post("/v1/chat/completions", {**BODY, "documents": [{"text": "b"}]})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            "`documents` are not read by this model's chat template"
        )
        for none in ([], None):
            answer = server.post("/v1/chat/completions", {**BODY, "documents": none})
            assert answer.status_code == 200, answer.text
        for wrong, param in (
            ("b", "documents"),
            (["b"], "documents.0"),
            ([{}] * 1025, "documents"),
        ):
            error = server.post("/v1/chat/completions", {**BODY, "documents": wrong}).json()[
                "error"
            ]
            assert error["param"] == param
