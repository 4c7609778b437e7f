"""Another process decodes the outputs that were encoded, and notices a gap."""

import pickle
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.deployments.deployment import Placement
from ropewalk.model_runtime.request import (
    FinishReason,
    Output,
    PromptProgress,
    Request,
    SamplingParams,
    Timings,
    TokenLogprob,
)
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.model_runtime.text.grammar_trial import ONE_SPACE
from ropewalk.rope import Linear, Profile, Tier, Unscaled
from ropewalk.server.replicas.wire import OutputDecoder, OutputEncoder, SentRequest
from tests.tokens import byte_tokenizer

TIERS = [Tier(64, 1.0, Profile(Unscaled())), Tier(256, 4.0, Profile(Linear(factor=4.0)))]
NUMBERS = st.integers(0, 2**31)
LOGPROBS = st.builds(
    TokenLogprob,
    NUMBERS,
    st.floats(-1e4, 0.0),
    st.lists(st.tuples(NUMBERS, st.floats(-1e4, 0.0)), max_size=2).map(tuple),
)


def lists_of(values: st.SearchStrategy) -> st.SearchStrategy:
    """Short tuples."""
    return st.lists(values, max_size=3).map(tuple)


def after_the_way(sent: Any) -> Any:
    """The same, as another process receives it."""
    return pickle.loads(pickle.dumps(sent))  # noqa: S301  # our own


OUTPUTS = st.builds(
    Output,
    text=st.text(max_size=5),
    token_ids=lists_of(NUMBERS),
    logprobs=lists_of(LOGPROBS),
    cut_logprobs=lists_of(LOGPROBS),
    prompt_logprobs=lists_of(st.none() | LOGPROBS),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_string=st.none() | st.text(max_size=3),
    num_cached_tokens=st.integers(0, 100),
    tier=st.sampled_from(TIERS),
    num_rescales=st.integers(0, 2),
    progress=st.none() | st.builds(PromptProgress, NUMBERS, NUMBERS, NUMBERS, st.floats(0, 9)),
    error=st.none() | st.text(max_size=5),
    timings=st.none() | st.builds(Timings, st.floats(0, 9), st.floats(0, 9)),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(OUTPUTS, max_size=6))
def test_outputs_are_the_same_after_the_way(outputs: list[Output]) -> None:
    """The tiers change at any place."""
    encoder, decoder = OutputEncoder(), OutputDecoder()
    sent = [after_the_way(encoder.encode(each)) for each in outputs]
    assert [decoder.decode(each) for each in sent] == outputs


def test_a_token_of_the_same_tier_is_three_fields() -> None:
    """Its number, its text and its token: the defaults and the tier are not sent."""
    encoder = OutputEncoder()
    first, second = (
        encoder.encode(Output(text=text, token_ids=(token,), tier=TIERS[0]))
        for text, token in (("a", 7), ("b", 8))
    )
    assert TIERS[0] in first
    assert second == (1, "b", (8,))


def test_an_output_without_a_tier_has_that_of_the_last_one() -> None:
    """Errors between two steps have none."""
    encoder, decoder = OutputEncoder(), OutputDecoder()
    decoder.decode(encoder.encode(Output(token_ids=(1,), tier=TIERS[1])))
    last = decoder.decode(encoder.encode(Output(finish_reason=FinishReason.ERROR)))
    assert last.tier == TIERS[1]
    back = decoder.decode(encoder.encode(Output(token_ids=(1,), tier=TIERS[0])))
    assert back.tier == TIERS[0]


def test_a_request_is_sent_with_what_its_grammar_is_compiled_from() -> None:
    """A compiled grammar cannot be pickled; another process compiles it again."""
    placement = Placement("m", TIERS[0], (), "fixed", None, 128)
    plain = Request("r", (1, 2), SamplingParams(seed=3), placement, "salt")
    assert SentRequest.of(plain, 0.5) == SentRequest(plain, None, 0.5)
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    grammar = GrammarCompiler(byte_tokenizer()).compile_again((schema, ONE_SPACE))
    sent = after_the_way(SentRequest.of(replace(plain, grammar=grammar), 0.5))
    assert sent.request == plain
    assert sent.grammar == grammar.source
    again = GrammarCompiler(byte_tokenizer()).compile_again(sent.grammar)
    one, other = (each.begin(frozenset()) for each in (grammar, again))
    assert one.look() is other.look() is True
    assert one.allowed == other.allowed
