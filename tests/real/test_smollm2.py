"""A real checkpoint answers as transformers does, and reads past its trained length."""

import copy
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from server.corpus.needles import SENTENCE, Needle
from tests.openai_client import openai_client_of
from tests.processes import Server
from tests.real_model import NATIVE_LEN, Reference

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TEXT = "\n".join(topics.values())  # the language reference, in English
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


def _complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "temperature": 0, **fields}
    answered = httpx.post(f"{server.url}/v1/completions", json=body, timeout=500)
    answered.raise_for_status()
    found: dict[str, Any] = answered.json()
    return found


@torch.inference_mode()
def _logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """The logprob of each token but the first, after the tokens before it."""
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    found = []
    for start in range(0, len(ids) - 1, 512):
        rows = model.lm_head(hidden[start : min(start + 512, len(ids) - 1)]).log_softmax(-1)
        wanted = torch.tensor(ids[start + 1 : start + 1 + len(rows)])
        found.append(rows.gather(1, wanted[:, None])[:, 0])
    return torch.cat(found)


def _rope(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]["rope"]
    return found


def _echoed(answer: dict[str, Any], num_tokens: int) -> torch.Tensor:
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    return torch.tensor(logprobs[1:num_tokens])


class _ExactAngles(nn.Module):
    """The tables of transformers with angles in float64.

    transformers rounds angles to float32. At 9,000 tokens that alone moved two logprobs of this
    prompt by 1.5e-3, and ours are within 1.3e-4 of those with exact angles.
    """

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self._inv_freq_P = rotary.inv_freq.double()
        self._scaling = rotary.attention_scaling

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, both of shape (1, positions, head dimensions)."""
        angle_P = position_ids[0].double()[:, None] * self._inv_freq_P
        angle_D = torch.cat([angle_P, angle_P], -1)[None]
        scaled = (angle_D.cos() * self._scaling, angle_D.sin() * self._scaling)
        return scaled[0].to(hidden.dtype), scaled[1].to(hidden.dtype)


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


@pytest.mark.parametrize("messages", CHATS, ids=["short", "system", "emoji"])
def test_a_greedy_chat_is_that_of_generate(
    served: Server, reference: Reference, messages: list[Any]
) -> None:
    """The chat template, the end tokens and every token are those of transformers."""
    client = openai_client_of(served)
    answer = client.chat.completions.create(
        model="smollm2", messages=messages, max_tokens=48, temperature=0
    )
    inputs = reference.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs.input_ids.shape[1]
    tokens = reference.model.generate(**inputs, max_new_tokens=48, do_sample=False)[0, length:]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == length
    expected = reference.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.choices[0].message.content == expected


def test_echoed_logprobs_within_the_trained_length(served: Server, reference: Reference) -> None:
    """They are within 1e-3 of transformers' at 1,500 tokens."""
    ids = reference.tokenizer(TEXT[:20_000], add_special_tokens=False).input_ids[:1500]
    answer = _complete(served, prompt=ids, echo=True, logprobs=0, max_tokens=1)
    assert _rope(answer)["rope_type"] == "default"
    difference = _echoed(answer, len(ids)) - _logprobs(reference.model, ids)
    assert difference.abs().max() < 1e-3


def _long_prompt(reference: Reference, num_tokens: int) -> list[int]:
    """Text of a length with a sentence near its beginning, and the question about it."""

    def encode(text: str) -> list[int]:
        found: list[int] = reference.tokenizer(text, add_special_tokens=False).input_ids
        return found

    start = TEXT.index("\n", 300) + 1
    begin, question = encode(TEXT[:start] + NEEDLE.definition), encode("\n\n" + NEEDLE.question)
    rest = encode(TEXT[start : start + 8 * num_tokens])
    return begin + rest[: num_tokens - len(begin) - len(question)] + question


def test_a_sentence_past_the_trained_length_is_found_only_with_scaling(
    served: Server, reference: Reference
) -> None:
    """Logprobs are within 1e-3 of transformers' static YaRN with exact angles at 9,000 tokens."""
    ids = _long_prompt(reference, 9000)
    answer = _complete(served, prompt=ids, echo=True, logprobs=0, max_tokens=6)
    assert _rope(answer)["rope_type"] == "yarn"
    assert _rope(answer)["factor"] == 2
    assert answer["choices"][0]["text"].endswith(NEEDLE.question + NEEDLE.value + ".")

    lost = _complete(served, prompt=ids, max_tokens=6, rope={"rope_type": "default"})
    assert _rope(lost)["rope_type"] == "default"
    assert NEEDLE.value not in lost["choices"][0]["text"]

    config = copy.deepcopy(reference.model.config)
    config.rope_parameters = {
        "rope_type": "yarn",
        "factor": 2.0,
        "rope_theta": config.rope_parameters["rope_theta"],
        "original_max_position_embeddings": NATIVE_LEN,
    }
    own = reference.model.model.rotary_emb
    reference.model.model.rotary_emb = _ExactAngles(type(own)(config))
    try:
        expected = _logprobs(reference.model, ids)
    finally:
        reference.model.model.rotary_emb = own
    assert (_echoed(answer, len(ids)) - expected).abs().max() < 1e-3
