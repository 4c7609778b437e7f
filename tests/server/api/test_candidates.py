"""`best_of`: more answers are computed than returned, and the likeliest ones are returned."""

from typing import Any

import pytest

from tests.server.api.asking import asked, streamed
from tests.servers.processes import Server

BODY: dict[str, Any] = {"prompt": "import os\n\ndef ", "max_tokens": 12, "seed": 11, "logprobs": 1}


def choices(server: Server, **options: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The choices and the usage of an answer."""
    answer = asked(server, "completions", **{**BODY, **options})
    return answer["choices"], answer["usage"]


def mean_logprob(choice: dict[str, Any]) -> float:
    """The mean logprob of a choice's tokens."""
    values = choice["logprobs"]["token_logprobs"]
    return float(sum(values) / len(values))


def test_the_likeliest_are_returned_best_first(server: Server) -> None:
    """The candidates are the answers that `n` would return."""
    every, _ = choices(server, n=6)
    best, usage = choices(server, n=2, best_of=6)
    ranked = sorted(every, key=mean_logprob, reverse=True)
    assert [each["text"] for each in best] == [each["text"] for each in ranked[:2]]
    assert [each["index"] for each in best] == [0, 1]
    assert usage["completion_tokens"] == sum(len(each["logprobs"]["tokens"]) for each in every)


def test_each_prompt_has_one_best_answer(server: Server) -> None:
    """Logprobs are computed to rank the candidates, but left out of the answer."""
    prompts = ["import os\n", "def close(self"]
    best, _ = choices(server, prompt=prompts, best_of=3, logprobs=None)
    assert [each["index"] for each in best] == [0, 1]
    assert all(each["logprobs"] is None for each in best)
    for prompt, choice in zip(prompts, best, strict=True):
        alone, _ = choices(server, prompt=prompt, best_of=3)
        assert alone[0]["text"] == choice["text"]


@pytest.mark.parametrize("best_of", [1, 3])
def test_as_many_as_are_returned_is_no_choice(server: Server, best_of: int) -> None:
    """The candidates come in the order of `n`, and the answer may be streamed."""
    every, _ = choices(server, n=best_of)
    same, _ = choices(server, n=best_of, best_of=best_of)
    assert same == every
    assert streamed(server, "completions", **BODY, n=best_of, best_of=best_of)
