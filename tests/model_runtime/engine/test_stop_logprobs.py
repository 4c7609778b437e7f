"""Logprobs end where the text ends, whatever a stop string removes."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.deployments.deployment import TierChoice
from ropewalk.model_runtime.engine.output_processor import Answer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import (
    FinishReason,
    Output,
    Request,
    SamplingParams,
    TokenLogprob,
)
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.scripted_model import Script
from tests.doubles.tokens import byte_tokenizer

TOKENIZER = byte_tokenizer()
NOWHERE: Any = None  # which answers do not read


def outputs_of(text: str, eos: str = "", **sampling: Any) -> list[Output]:
    """The outputs of an answer whose tokens are the bytes of a text."""
    tier_choice: TierChoice = NOWHERE
    params = SamplingParams(max_tokens=100, logprobs=0, **sampling)
    made = Answer(
        Request("a", (1,), params, tier_choice), TOKENIZER, frozenset(TOKENIZER.encode(eos))
    )
    found: list[Output] = []
    for token_id in TOKENIZER.encode(text):
        found.append(made.add(token_id, TokenLogprob(token_id, -1.0, ())))
        if found[-1].finish_reason is not None:
            break
    return found


def told(outputs: list[Output]) -> str:
    """The text of the tokens whose logprobs are reported."""
    return TOKENIZER.decode([each.token_id for output in outputs for each in output.logprobs])


@settings(deadline=None)
@given(st.text("aé€b", max_size=30), st.lists(st.text("aé€b", min_size=1, max_size=3), max_size=3))
def test_the_tokens_of_every_piece_are_those_of_its_text(text: str, stops: list[str]) -> None:
    """At no moment of a stream does a logprob come without its text, or much after it."""
    outputs = outputs_of(text, stop=tuple(stops))
    for num in range(1, len(outputs) + 1):
        sent = "".join(each.text for each in outputs[:num])
        if stops:
            assert told(outputs[:num]) == sent
    generated = [token for each in outputs for token in each.token_ids]
    shown = [entry.token_id for each in outputs for entry in each.logprobs]
    is_stopped = bool(outputs) and outputs[-1].finish_reason is FinishReason.STOP
    cut = [entry.token_id for entry in outputs[-1].cut_logprobs] if is_stopped else []
    if is_stopped:
        assert shown + cut == generated
    elif not stops:
        assert shown == generated


def test_held_logprobs_come_with_their_text() -> None:
    """The tokens that may begin the stop string wait, and go with the next piece."""
    outputs = outputs_of("an end. entry", stop=("entropy",), eos=".")
    assert [len(each.logprobs) for each in outputs] == [1, 1, 1, 0, 0, 3, 1]
    assert [each.text for each in outputs] == ["a", "n", " ", "", "", "end", ""]
    assert outputs[-1].cut_logprobs == ()


def test_before_min_tokens_nothing_waits() -> None:
    """No stop string may end the answer there, so its text is sent at once."""
    outputs = outputs_of("abab", stop=("ab",), min_tokens=3)
    assert [(each.text, len(each.logprobs)) for each in outputs] == [
        *[("a", 1), ("b", 1), ("", 0), ("", 0)]
    ]
    assert len(outputs[-1].cut_logprobs) == 2


def test_an_engine_answers_so(engines: EngineFactory, llama_checkpoint: Checkpoint) -> None:
    """The tokens of the stop string are generated and counted, but not reported."""
    engine = engines.over(llama_checkpoint, runner=Script(llama_checkpoint, "hello world"))
    deployment = deployment_of(llama_checkpoint)
    cut, whole = answer(
        engine,
        request(deployment, [1], max_tokens=50, stop=("o w",), logprobs=1),
        request(deployment, [1], max_tokens=6, stop=("o world",), logprobs=1),
    )
    assert (cut.text, len(cut.token_ids), len(cut.logprobs)) == ("hell", 7, 4)
    assert (whole.text, len(whole.token_ids), len(whole.logprobs)) == ("hello ", 6, 6)
