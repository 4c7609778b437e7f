"""/v1/completions over a real socket, mostly through openai's own client."""

import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.server.api.asking import asked, tokens_of
from tests.servers.metrics import samples_of, total
from tests.servers.processes import Server, without_replicas

GREEDY: dict[str, Any] = {"model": "ropewalk-demo", "temperature": 0}
PROMPT = "import os\nimport sys\n\ndef "


@pytest.fixture(scope="module")
def untouched() -> Any:
    """The same checkpoint under transformers alone."""
    return AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)


def needle_prompt(server: Server, num_tokens: int) -> list[int]:
    """A definition, library code, and the question; about `num_tokens` long."""
    code = Path(os.__file__).read_text()
    definition = tokens_of(server, "PORT_4821 = 93175\n")
    question = tokens_of(server, "\nprint(PORT_4821)  # -> ")[1:]
    filling = tokens_of(server, code)[1:]
    return definition + filling[: num_tokens - len(definition) - len(question)] + question


def test_greedy_tokens_are_transformers(
    server: Server, openai_client: openai.OpenAI, untouched: Any
) -> None:
    """Within the trained length, the echoed logprobs also agree within 1e-4."""
    ids = tokens_of(server, PROMPT)
    answer = openai_client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=60, echo=True, logprobs=1
    )
    generated = untouched.generate(
        torch.tensor([ids]), max_new_tokens=60, do_sample=False, pad_token_id=1
    )[0]
    choice = answer.choices[0]
    assert choice.logprobs is not None
    with torch.inference_mode():
        table = untouched(generated[None]).logits[0].log_softmax(-1)
    expected = table[:-1].gather(1, generated[1:, None])[:, 0].tolist()
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 60)
    assert choice.text.startswith(PROMPT)
    assert tokens_of(server, choice.text) == generated.tolist()


def test_a_definition_eight_native_lengths_back_is_found(
    server: Server, openai_client: openai.OpenAI
) -> None:
    """The default scaling finds the definition; the extrapolated untouched table does not."""
    prompt = needle_prompt(server, 2030)
    answer = openai_client.completions.create(**GREEDY, prompt=prompt, max_tokens=5)
    assert answer.choices[0].text == "93175"
    rope = answer.choices[0].model_extra["rope"]  # type: ignore[index]
    assert rope == {
        "rope_type": "yarn",
        "factor": 8.0,
        "requested_factor": None,
        "original_max_position_embeddings": 256,
        "policy": "by_position",
        "rescaled": 0,
        "same_bits_in_any_batch": True,
    }
    extrapolated = openai_client.completions.create(
        **GREEDY, prompt=prompt, max_tokens=5, extra_body={"rope": {"rope_type": "default"}}
    )
    assert extrapolated.choices[0].text != "93175"
    assert extrapolated.choices[0].model_extra["rope"]["rope_type"] == "default"  # type: ignore[index]


def test_a_stream_says_what_the_whole_answer_says(openai_client: openai.OpenAI) -> None:
    """The text, the logprobs, the finish reason and the usage are compared.

    The text at each offset is the text of the token.
    """
    options: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 30, "logprobs": 2}
    whole = openai_client.completions.create(**options, echo=True)
    chunks = list(
        openai_client.completions.create(
            **options, echo=True, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices] == [None] * 29 + ["length"]
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [each for choice in choices for each in getattr(choice.logprobs, name)]
        assert streamed == getattr(whole.choices[0].logprobs, name)
    logprobs = whole.choices[0].logprobs
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[1:]:
        assert whole.choices[0].text[offset : offset + len(token)] == token


def test_a_seed_repeats_and_no_seed_does_not(openai_client: openai.OpenAI) -> None:
    """The temperature is 1, except for the greedy references."""

    def text(**options: Any) -> str:
        return (
            openai_client.completions.create(
                model="ropewalk-demo", prompt=PROMPT, max_tokens=25, **options
            )
            .choices[0]
            .text
        )

    assert text(seed=5) == text(seed=5)
    assert len({text(seed=seed) for seed in range(4)}) > 1
    assert len({text() for _ in range(4)}) > 1
    assert text(top_p=1e-9) == text(temperature=0)
    assert text(extra_body={"top_k": 1}) == text(temperature=0)


def test_several_prompts_with_several_answers_each(
    server: Server, openai_client: openai.OpenAI
) -> None:
    """Choices come in the order of the prompts, and equal those of separate requests."""
    prompts = ["import os\n", PROMPT, "def close(self):\n"]
    options: dict[str, Any] = {"model": "ropewalk-demo", "max_tokens": 8, "seed": 3, "logprobs": 1}
    together = openai_client.completions.create(**options, prompt=prompts, n=2)
    assert [choice.index for choice in together.choices] == list(range(6))
    for at, prompt in enumerate(prompts):
        first = openai_client.completions.create(**options, prompt=prompt)
        assert together.choices[2 * at].text == first.choices[0].text
        second = openai_client.completions.create(**{**options, "seed": 4}, prompt=prompt)
        assert together.choices[2 * at + 1].text == second.choices[0].text
    assert together.usage is not None
    assert together.usage.completion_tokens == 48
    assert together.usage.prompt_tokens == sum(len(tokens_of(server, each)) for each in prompts)

    texts = dict.fromkeys(range(6), "")
    ids = [tokens_of(server, each) for each in prompts]
    for chunk in openai_client.completions.create(**options, prompt=ids, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in together.choices]


def num_under_other_tables(server: Server) -> float:
    """The prompt tokens so far that the cache had under other tables only."""
    return total(samples_of(server), "ropewalk_prompt_tokens_under_other_tables_total")


@without_replicas  # each replica has pages of its own
@pytest.mark.parametrize(
    "rope", [{"policy": "grow"}, {"rope_type": "linear"}, {"policy": "fixed", "factor": 8}]
)
def test_prompts_that_the_cache_has_under_other_tables_are_counted(
    server: Server, rope: dict[str, Any]
) -> None:
    """Mixed policies and methods divide the cache, which the metric tells."""
    salt = json.dumps(rope)
    prompt = [at % 199 + 9 for at in range(900)]
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}

    def ask(**more: Any) -> tuple[int, float]:
        before = num_under_other_tables(server)
        answer = asked(server, "completions", **{**body, **more})
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, num_under_other_tables(server) - before

    assert ask() == (0, 0)
    assert ask() == (896, 0)
    cached, num_missed = ask(rope=rope)
    assert num_missed > 0
    assert cached + num_missed == 896
    assert ask(rope=rope) == (896, 0)
    assert ask(cache_salt=f"another {salt}") == (0, 0), "another salt is another text"


def test_penalties_bias_and_end_tokens(server: Server, openai_client: openai.OpenAI) -> None:
    """Each field changes the greedy answer in the way its name states."""
    token = tokens_of(server, "import")[1]

    def create(**options: Any) -> Any:
        return openai_client.completions.create(
            **{**GREEDY, "prompt": PROMPT, "max_tokens": 30, **options}
        )

    forced = create(logit_bias={str(token): 100}, max_tokens=5)
    assert forced.choices[0].text == "import" * 5
    ended = create(
        logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token], "min_tokens": 4}
    )
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (5, "stop")
    plain = create().choices[0].text
    assert create(frequency_penalty=2).choices[0].text != plain
    assert create(presence_penalty=2).choices[0].text != plain
    assert create(extra_body={"repetition_penalty": 1.5}).choices[0].text != plain
    assert create(temperature=1, extra_body={"min_p": 1.0}).choices[0].text == plain


@pytest.mark.parametrize("rope", [{"policy": "grow"}, {"policy": "fixed", "factor": 4}])
def test_four_native_lengths_equal_static_yarn(
    server: Server, openai_client: openai.OpenAI, rope: dict[str, Any]
) -> None:
    """The echoed logprobs of a prompt of exactly 4 L are within 1e-3 of transformers."""
    from transformers import AutoConfig

    prompt = needle_prompt(server, 1024)
    assert len(prompt) == 1024
    answer = openai_client.completions.create(
        **GREEDY, prompt=prompt, max_tokens=0, echo=True, logprobs=0, extra_body={"rope": rope}
    )
    config = AutoConfig.from_pretrained(EMBEDDED_MODEL)
    config.max_position_embeddings = 1024
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    static = AutoModelForCausalLM.from_pretrained(
        EMBEDDED_MODEL, config=config, dtype=torch.float32
    )
    with torch.inference_mode():
        table = static(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = table[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0].tolist()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert answer.choices[0].finish_reason == "length"
