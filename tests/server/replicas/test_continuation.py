"""A request that loses its replica gives the client exactly what it would have had."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.deployments.deployment import Placement
from ropewalk.model_runtime.engine.output_processor import Answer
from ropewalk.model_runtime.request import (
    FinishReason,
    Output,
    Request,
    SamplingParams,
    TokenLogprob,
)
from ropewalk.rope import Profile, Tier, Unscaled
from ropewalk.server.replicas.continuation import DeliveredAnswer, DivergedError
from tests.tokens import byte_tokenizer

TIER = Tier(128, 1.0, Profile(Unscaled()))
REPEATED = (3, 3, 3, 3)  # tokens that a wrong place among them would not show


@dataclass(frozen=True)
class Whole:
    """A whole answer, before it is cut into outputs."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]

    @classmethod
    def joined(cls, outputs: Sequence[Output]) -> "Whole":
        """The answer that a client puts together."""
        return cls(
            tuple(token for each in outputs for token in each.token_ids),
            "".join(each.text for each in outputs),
            tuple(entry for each in outputs for entry in each.logprobs),
            tuple(entry for each in outputs for entry in each.prompt_logprobs),
        )


def logprobs_of(number: int) -> tuple[TokenLogprob, ...]:
    """As many logprobs, all different."""
    return tuple(TokenLogprob(at, -at / 8, ((at, -at / 8),)) for at in range(number))


ANSWERS = st.builds(
    Whole,
    st.one_of(st.just(REPEATED), st.lists(st.integers(0, 5), max_size=12).map(tuple)),
    st.text("abä€", max_size=12),
    st.integers(0, 8).map(logprobs_of),
    st.integers(0, 4).map(lambda number: (None, *logprobs_of(number)) if number else ()),
)


@st.composite
def cuts(draw: st.DrawFn, whole: Whole) -> list[Output]:
    """Outputs that make up the answer. Each field is cut at places of its own."""
    num = draw(st.integers(1, 6))

    def places(length: int) -> list[tuple[int, int]]:
        inner = draw(st.lists(st.integers(0, length), min_size=num - 1, max_size=num - 1))
        return list(itertools.pairwise([0, *sorted(inner), length]))

    fields = [whole.token_ids, whole.text, whole.logprobs, whole.prompt_logprobs]
    ranges = [places(len(each)) for each in fields]
    outputs = []
    for at in range(num):
        tokens, text, logprobs, prompt = (
            field[slice(*each[at])] for field, each in zip(fields, ranges, strict=True)
        )
        outputs.append(
            Output(
                text=text,
                token_ids=tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt,
                num_cached_tokens=draw(st.integers(0, 3)),
                tier=TIER,
            )
        )
    outputs[-1] = outputs[-1]._replace(finish_reason=FinishReason.LENGTH)
    return outputs


@settings(max_examples=200, deadline=None)
@given(st.data(), ANSWERS)
def test_any_number_of_losses_anywhere_gives_the_undisturbed_answer(
    data: st.DataObject, whole: Whole
) -> None:
    """Each run may be cut into other outputs, and each may be lost after any of them."""
    answer, delivered = DeliveredAnswer(), list[Output]()
    num_losses = data.draw(st.integers(0, 4))
    for number in range(num_losses + 1):
        outputs = data.draw(cuts(whole))
        if number < num_losses:
            outputs = outputs[: data.draw(st.integers(0, len(outputs) - 1))]
        for output in outputs:
            delivered += answer.take(output)
        assert answer.num_tokens == len(Whole.joined(delivered).token_ids)
        if number < num_losses:
            answer.begin_again()
    assert Whole.joined(delivered) == whole
    assert [each.finish_reason for each in delivered].count(FinishReason.LENGTH) == 1
    assert delivered[-1].finish_reason is FinishReason.LENGTH


@settings(deadline=None)
@given(st.data(), ANSWERS.filter(lambda whole: len(whole.token_ids) > 0))
def test_a_different_token_is_never_delivered_after_those_of_another_run(
    data: st.DataObject, whole: Whole
) -> None:
    """The second run differs in one token that the client has."""
    answer = DeliveredAnswer()
    for output in data.draw(cuts(whole))[:-1]:
        list(answer.take(output))
    known = answer.num_tokens
    answer.begin_again()
    if not known:
        return
    at = data.draw(st.integers(0, known - 1))
    other = (*whole.token_ids[:at], 99, *whole.token_ids[at + 1 :])
    changed = Whole(other, whole.text, whole.logprobs, whole.prompt_logprobs)
    delivered = list[Output]()

    def take_all() -> None:
        for output in data.draw(cuts(changed)):
            delivered.extend(answer.take(output))

    with pytest.raises(DivergedError):
        take_all()
    assert not Whole.joined(delivered).token_ids


def test_an_answer_that_ends_before_what_was_sent_differs() -> None:
    """The client would have tokens that the answer does not have."""
    answer = DeliveredAnswer()
    list(answer.take(Output(text="ab", token_ids=(1, 2))))
    answer.begin_again()
    with pytest.raises(DivergedError):
        list(answer.take(Output(text="a", token_ids=(1,), finish_reason=FinishReason.STOP)))


def test_errors_and_aborts_are_passed_on_whatever_was_repeated() -> None:
    """An engine's error is an answer, too."""
    for reason in (FinishReason.ERROR, FinishReason.ABORT):
        answer = DeliveredAnswer()
        list(answer.take(Output(text="ab", token_ids=(1, 2))))
        answer.begin_again()
        last = Output(finish_reason=reason, error="out of chalk")
        assert list(answer.take(last)) == [last]


def test_an_answer_has_one_number_of_cached_tokens() -> None:
    """The first is counted by the metrics, and the client reads the last."""
    answer = DeliveredAnswer()
    list(answer.take(Output(token_ids=(1,), num_cached_tokens=16)))
    answer.begin_again()
    list(answer.take(Output(token_ids=(1,), num_cached_tokens=0)))
    (new,) = answer.take(Output(token_ids=(2,), finish_reason=FinishReason.LENGTH))
    assert new.num_cached_tokens == 16


def written(text: str, **sampling: object) -> list[Output]:
    """The engine's own outputs of a text, one token each."""
    ids = byte_tokenizer().encode(text)
    params = SamplingParams(max_tokens=len(ids), **sampling)  # type: ignore[arg-type]
    placement = Placement("m", TIER, (), "fixed", None, 128)
    answer = Answer(Request("r", (1,), params, placement), byte_tokenizer(), frozenset())
    outputs = []
    wanted = params.logprobs is not None
    for token, logprob in zip(ids, logprobs_of(len(ids)), strict=True):
        outputs.append(answer.add(token, logprob if wanted else None))
        if outputs[-1].finish_reason is not None:
            return outputs
    raise AssertionError("it has an end")


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("one two three", ("three",)),  # held back as long as it may begin
        ("one two three", ("two three!", "twice")),  # held back, and then sent
        ("grün 😀 ende", ()),  # characters of several tokens
        ("a😀", ("a😀b",)),
    ],
)
@pytest.mark.parametrize("logprobs", [None, 1])
def test_text_that_is_held_back_survives_a_loss_after_every_token(
    text: str, stop: tuple[str, ...], logprobs: int | None
) -> None:
    """Two losses at any two places."""
    undisturbed = written(text, stop=stop, logprobs=logprobs)
    for first, second in itertools.product(range(len(undisturbed)), repeat=2):
        answer, delivered = DeliveredAnswer(), list[Output]()
        for run in (undisturbed[:first], undisturbed[:second], undisturbed):
            for output in run:
                delivered += answer.take(output)
            answer.begin_again()
        assert Whole.joined(delivered) == Whole.joined(undisturbed)
        assert delivered[-1].stop_string == undisturbed[-1].stop_string
        assert delivered[-1].cut_logprobs == undisturbed[-1].cut_logprobs
