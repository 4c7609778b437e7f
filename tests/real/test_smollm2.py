"""SmolLM2 Instruct: its tokens, its chats, its tool calls, and a text past its trained length."""

import json
from typing import Any

import httpx
import openai
import pytest

from ropewalk.server.corpus.needles import SENTENCE, Needle
from tests.checkpoints.real_model import SMOLLM2
from tests.checkpoints.real_reference import Reference
from tests.servers.openai_client import openai_client_of
from tests.servers.processes import Server
from tests.servers.real_client import CONTINUED, PROMPT, TEXT, complete, echoed, rope_of, text_of

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    # By name, so that it shares its server with the other file.
    pytest.mark.parametrize("checkpoint", [SMOLLM2], indirect=True, ids=["smollm2"]),
]

NEEDLE = Needle(SENTENCE, "amber lighthouse", "48213")
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because air scatters blue light more than red."},
        {"role": "user", "content": "And at sunset?"},
    ],
    [{"role": "user", "content": "Repeat exactly: naïve café 🦜 — 東京, \u202fπ≈3.14159"}],
]
ODDITIES = [
    "Hello world",
    "  two spaces,\ttabs\n\n\nand lines  \n",
    "12345 007 3.14159 1,000,000",
    "don't WE'LL they've I'd",
    "naïve café, Straße, Ελλάδα, Привет, 東京タワー, नमस्ते, العربية",
    "🦜🪢👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff",
    "def f(x):\n    return x ** 2  # ok\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "https://example.org/a?b=c&d=%20#e",
]
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


@pytest.mark.parametrize("text", ODDITIES)
def test_text_becomes_the_tokens_of_transformers(
    served: Server, reference: Reference, text: str
) -> None:
    """The tokens become the text again, too."""
    body = {"prompt": text, "add_special_tokens": False}
    ids = httpx.post(f"{served.url}/tokenize", json=body).json()["tokens"]
    assert ids == reference.tokenizer(text, add_special_tokens=False).input_ids
    again = httpx.post(f"{served.url}/detokenize", json={"tokens": ids}).json()
    assert again["prompt"] == text


def test_a_greedy_completion_is_the_recorded_one(served: Server) -> None:
    """The text is that of transformers, which the long tests ask."""
    answer = complete(served, prompt=PROMPT, max_tokens=24)
    assert text_of(answer) == CONTINUED["smollm2"]


@pytest.mark.long
@pytest.mark.parametrize("messages", CHATS, ids=["short", "system", "emoji"])
def test_a_greedy_chat_is_that_of_generate(
    served: Server, reference: Reference, messages: list[Any]
) -> None:
    """The chat template, the end tokens and every token are those of transformers."""
    client = openai_client_of(served)
    answer = client.chat.completions.create(
        model="whole", messages=messages, max_tokens=24, temperature=0
    )
    inputs = reference.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs.input_ids.shape[1]
    tokens = reference.model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, length:]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == length
    expected = reference.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.choices[0].message.content == expected


def test_the_model_calls_a_tool_and_ends(served: Server) -> None:
    """The forced call is valid JSON of the schema; the second answer is text that ends."""
    messages: list[object] = [{"role": "user", "content": "How is the weather in Paris?"}]
    with openai_client_of(served) as client:

        def ask(**fields: object) -> openai.types.chat.chat_completion.Choice:
            answer = client.chat.completions.create(
                model="whole",
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


@pytest.mark.long
def test_logprobs_of_a_short_prompt(served: Server, reference: Reference) -> None:
    """They are within 1e-4 of transformers' with exact angles."""
    ids = reference.encode(TEXT[:2000])[:400]
    answer = complete(served, prompt=ids, echo=True, logprobs=0, max_tokens=1)
    with reference.exact_angles():
        expected = reference.logprobs(ids)
    assert (echoed(answer, len(ids)) - expected).abs().max() < 1e-4


def _long_prompt(reference: Reference, num_tokens: int) -> list[int]:
    """Text of a length with a sentence near its beginning, and the question about it."""
    encode = reference.encode
    start = TEXT.index("\n", 300) + 1
    begin, question = encode(TEXT[:start] + NEEDLE.definition), encode("\n\n" + NEEDLE.question)
    rest = encode(TEXT[start : start + 8 * num_tokens])
    return begin + rest[: num_tokens - len(begin) - len(question)] + question


@pytest.mark.long
def test_a_sentence_past_the_trained_length_is_found_only_with_scaling(
    served: Server, reference: Reference
) -> None:
    """The prompt has 9,000 tokens, and the model was trained on 8,192."""
    ids = _long_prompt(reference, 9000)
    answer = complete(served, prompt=ids, max_tokens=6)
    assert rope_of(answer) == ("yarn", 2)
    assert text_of(answer).startswith(NEEDLE.value)
    lost = complete(served, prompt=ids, max_tokens=6, rope={"rope_type": "default"})
    assert rope_of(lost)[0] == "default"
    assert NEEDLE.value not in text_of(lost)
