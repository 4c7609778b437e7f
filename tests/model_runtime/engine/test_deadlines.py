"""Requests whose time is over: they end with what they have, and others go on."""

import time
from dataclasses import replace

import pytest

from ropewalk.model_runtime.engine.output_processor import Answer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Request
from tests.doubles.deferred_runner import Answers, core_of
from tests.doubles.engines import deployment_of, request

HOUR_S = 3600.0


def asked(checkpoint: Checkpoint, number: int, deadline: float | None = None) -> Request:
    """A request of forty tokens."""
    sampling = {"ignore_eos": True, "temperature": 0.7, "seed": number, "max_tokens": 40}
    made = request(deployment_of(checkpoint), [number, 3, 5], **sampling)
    return replace(made, request_id=f"r{number}", deadline=deadline)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_requests_end_when_their_time_is_over(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, *, is_ahead: bool
) -> None:
    """Also with a step in flight; the requests with more time answer as they do alone."""
    reference = Answers(core_of(llama_checkpoint, is_ahead=False), llama_checkpoint)
    reference.add(*(asked(llama_checkpoint, number) for number in range(1, 5)))
    reference.finish()
    expected = reference.results()
    now = time.monotonic
    core = core_of(llama_checkpoint, is_ahead=is_ahead, max_num_seqs=3)
    answers = Answers(core, llama_checkpoint)
    times = (HOUR_S, 3 * HOUR_S, None, HOUR_S)
    answers.add(
        *(
            asked(llama_checkpoint, number, None if seconds is None else now() + seconds)
            for number, seconds in enumerate(times, 1)
        )
    )
    for _ in range(8):
        core.step()
    monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * HOUR_S)
    answers.finish()
    first, second, third, fourth = answers.results().values()
    assert first.finish_reason is FinishReason.LENGTH
    assert 0 < len(first.token_ids) < 40
    assert first.token_ids == expected["r1"].token_ids[: len(first.token_ids)]
    assert (second, third) == (expected["r2"], expected["r3"])
    assert (fourth.finish_reason, fourth.token_ids) == (FinishReason.TIMEOUT, ())


def test_the_last_output_has_what_was_held_back(llama_checkpoint: Checkpoint) -> None:
    """Text that may begin a stop string, and its logprobs, wait for the next token."""
    made = request(deployment_of(llama_checkpoint), [1], stop=("abc",), max_tokens=9)
    answer = Answer(made, llama_checkpoint.tokenizer, frozenset())
    assert answer.out_of_time().finish_reason is FinishReason.TIMEOUT
    for token_id in llama_checkpoint.tokenizer.encode("ab"):
        assert not answer.add(token_id, None).text
    last = answer.out_of_time()
    assert (last.text, last.finish_reason) == ("ab", FinishReason.LENGTH)
