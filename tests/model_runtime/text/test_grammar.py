"""Answers that a grammar constrains: always valid, and otherwise like any other answer."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
import torch

from ropewalk.model_runtime.errors import QueueFullError, RequestError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Request, SamplingParams
from ropewalk.model_runtime.runner.sampler import SamplingRow, adjusted, sample
from ropewalk.model_runtime.text import grammar as grammar_module
from ropewalk.model_runtime.text.grammar import ANY_OBJECT, Grammar, GrammarCompiler
from tests.doubles.engines import (
    EngineFactory,
    Preemptions,
    Result,
    answer,
    deployment_of,
    request,
    tiny_checkpoint,
)
from tests.oracles.schemas import HOSTILE, SCHEMAS

NUM_SEEDS = 8
YARN = {"rope_type": "yarn", "factor": 4.0}
BOUNDED_S = 12.0  # the default deadline, twice, and some


@pytest.fixture(scope="module")
def compiler(embedded: Checkpoint) -> GrammarCompiler:
    """A compiler over the embedded model's tokenizer."""
    return GrammarCompiler(embedded.tokenizer)


def compiled(compiler: GrammarCompiler, schema: Any) -> Grammar:
    """The grammar of a schema, compiled like in the server, but waited for."""
    return compiler.compile(compiler.text_of(schema)).result()


def held_to(grammar: Grammar | None, checkpoint: Checkpoint, **options: Any) -> Request:
    """A sampled request whose answer that grammar constrains."""
    prompt = checkpoint.tokenizer.encode(options.pop("prompt", "import json\n\ndata = "))
    sampling = {"temperature": 1.0, "max_tokens": 160, **options}
    return replace(request(deployment_of(checkpoint), prompt, **sampling), grammar=grammar)


def is_valid(schema: Any, result: Result) -> bool:
    """Whether the answer has ended and an independent validator accepts it."""
    return jsonschema_rs.is_valid(schema, json.loads(result.text))


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_finished_answer_satisfies_its_schema(
    name: str, compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """An untrained model samples at temperature 1 under several seeds."""
    grammar = compiled(compiler, SCHEMAS[name])
    requests = [held_to(grammar, embedded, seed=seed) for seed in range(NUM_SEEDS)]
    results = answer(engines.over(embedded), *requests)
    finished = [each for each in results if each.finish_reason is FinishReason.STOP]
    assert finished, [each.text for each in results]
    for each in finished:
        assert is_valid(SCHEMAS[name], each), each.text
    for each in results:
        assert each.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_preemption_and_crossings_change_nothing(
    compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """A sequence that is computed again must not advance its matcher a second time."""
    grammar = compiled(compiler, {"type": "array", "items": {"type": "integer"}, "minItems": 60})
    prompt = embedded.tokenizer.encode("import os\n" * 100)[:220]
    for policy in ("by_position", "grow-exact"):
        deployment = deployment_of(embedded, rope_scaling=YARN, rope_policy=policy)
        drawn = {"temperature": 1.0, "max_tokens": 70}  # beyond the trained length of 256
        requests = [
            replace(request(deployment, prompt, seed=seed, **drawn), grammar=grammar)
            for seed in range(3)
        ]
        expected = answer(engines.over(embedded), *requests)
        counter = Preemptions()
        tight = engines.over(embedded, kv_cache_tokens=400, max_model_len=352, observer=counter)
        assert answer(tight, *requests) == expected
        assert counter.num > 0
        assert [each.num_rescales for each in expected] == [1, 1, 1]


def test_logprobs_are_those_of_the_raw_logits(
    compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """The reference is the prompt logprobs of the same tokens."""
    engine = engines.over(embedded)
    grammar = compiled(compiler, SCHEMAS["required"])
    constrained = held_to(grammar, embedded, seed=1, logprobs=0, max_tokens=40)
    found = answer(engine, constrained)[0]
    whole = replace(
        held_to(None, embedded, max_tokens=0, prompt_logprobs=0),
        prompt_ids=(*constrained.prompt_ids, *found.token_ids),
    )
    expected = answer(engine, whole)[0].prompt_logprob_values()[-len(found.token_ids) :]
    assert [each.logprob for each in found.logprobs] == pytest.approx(expected, abs=1e-4)


def test_a_complete_answer_ends_whatever_min_tokens_says(
    compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """An answer reaches min_tokens only if the grammar allows more text."""
    engine = engines.over(embedded)
    short = held_to(compiled(compiler, {"const": True}), embedded, min_tokens=50)
    number = held_to(compiled(compiler, {"minimum": 1, "type": "integer"}), embedded, min_tokens=12)
    ended, gone_on = answer(engine, short, number)
    assert (ended.text, ended.finish_reason) == ("true", FinishReason.STOP)
    assert len(gone_on.token_ids) > 12
    json.loads(gone_on.text)


def test_end_tokens_only_where_the_grammar_may_end(
    compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """The end tokens of the model and of the request have a large bias."""
    brace, end = (
        embedded.tokenizer.encode("}", add_special_tokens=False)[-1],
        min(embedded.eos_token_ids),
    )
    bias = ((end, 100.0), (brace, 50.0))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = held_to(compiled(compiler, schema), embedded, logit_bias=bias)
    found = answer(engines.over(embedded), wanted)[0]
    assert is_valid(schema, found)
    # Nothing may follow a 0, so that an answer which begins with it needs no end token.
    above_zero = compiled(compiler, {"type": "integer", "minimum": 1})
    integer = held_to(above_zero, embedded, logit_bias=bias)
    digits = answer(engines.over(embedded), integer)[0]
    assert digits.token_ids[-1] == end
    assert is_valid({"type": "integer"}, digits)
    own = held_to(integer.grammar, embedded, logit_bias=((brace, 100.0),), stop_token_ids=(brace,))
    digits = answer(engines.over(embedded), own)[0]
    assert digits.token_ids[-1] == brace
    assert is_valid({"type": "integer"}, digits)


def test_a_stop_string_ends_the_answer_where_it_stands(
    compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """An answer cut by a stop string is no valid JSON, but the request states the string."""
    grammar = compiled(compiler, {"const": {"a": "end here"}})
    found = answer(engines.over(embedded), held_to(grammar, embedded, stop=("end",)))[0]
    assert found.finish_reason is FinishReason.STOP
    assert found.text.endswith('"')
    assert "end" not in found.text


def test_a_model_without_end_tokens_ends_with_its_grammar(engines: EngineFactory) -> None:
    """The model's vocabulary is wider than the tokenizer's; unknown tokens are never sampled."""
    checkpoint = tiny_checkpoint("llama", vocab_size=300)
    schema = {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 3}
    grammar = compiled(GrammarCompiler(checkpoint.tokenizer), schema)
    bias = tuple((token_id, 100.0) for token_id in range(256, 300))
    requests = [
        held_to(grammar, checkpoint, seed=seed, logit_bias=bias) for seed in range(NUM_SEEDS)
    ]
    results = answer(engines.over(checkpoint), *requests)
    assert max(token for each in results for token in each.token_ids) < 256
    finished = [each for each in results if each.finish_reason is FinishReason.STOP]
    assert finished
    assert all(is_valid(schema, each) for each in finished)


class _Broken:
    """A matcher that fails after some tokens, by an error of its own or by a panic."""

    def __init__(self, matcher: Any, panics_in: str) -> None:
        self._matcher, self._panics_in, self._num_tokens = matcher, panics_in, 0

    def deep_copy(self) -> "_Broken":
        return _Broken(self._matcher.deep_copy(), self._panics_in)

    def consume_token(self, token_id: int) -> bool:
        self._num_tokens += 1
        if self._num_tokens == 3 and self._panics_in == "error":
            return bool(self._matcher.consume_token(10**6))
        return bool(self._matcher.consume_token(token_id))

    def __getattr__(self, name: str) -> Any:
        if name == self._panics_in and self._num_tokens == 3:
            raise BaseException("a panic")  # noqa: TRY002  # as pyo3 raises it
        return getattr(self._matcher, name)


@pytest.mark.parametrize("panics_in", ["error", "compute_bitmask", "is_stopped"])
def test_a_fault_of_a_matcher_ends_its_answer_only(
    panics_in: str, compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """An answer whose matcher fails ends with an error; the neighbours answer as alone."""
    good = compiled(compiler, SCHEMAS["required"])
    broken = replace(good, matcher=_Broken(good.matcher, panics_in))
    neighbours = [held_to(good, embedded, seed=3), held_to(None, embedded, max_tokens=30)]
    expected = answer(engines.over(embedded), *neighbours)
    engine = engines.over(embedded)
    ill, *well = answer(engine, held_to(broken, embedded), *neighbours)
    assert ill.finish_reason is FinishReason.REFUSED
    assert well == expected
    assert engine.is_running


def test_a_mask_leaves_the_rest_of_the_row_and_other_rows_alone() -> None:
    """Tokens behind the end of the mask are not allowed."""
    logits = torch.randn(3, 21)
    free = SamplingRow(SamplingParams(), 0, frozenset())
    mask = bytes([0b0000_0101, 0b1000_0000])
    got = adjusted(logits, [free, replace(free, allowed=mask), free])
    assert torch.equal(got[[0, 2]], logits[[0, 2]])
    kept = [index for index in range(21) if got[1, index] != -torch.inf]
    assert kept == [0, 2, 15]
    assert torch.equal(got[1, kept], logits[1, kept])
    only = replace(free, allowed=bytes([0, 2]), params=SamplingParams(logit_bias=((0, 100.0),)))
    assert sample(logits, [only, free, only])[::2] == [9, 9]


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"minimum": 3, "maximum": 2, "type": "number"}, "Unsatisfiable"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "maxProperties"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "not disjoint"),
        ({"$ref": "http://example.org/a"}, "http://example.org/a"),
        ({"$ref": "#/$defs/a"}, "does not exist"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf needs alternatives of which"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {"properties": {"b": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}
                },
            },
            "a $ref that leads back to itself",
        ),
        ({"const": float("nan")}, "is no JSON"),
        ({"const": "\ud800"}, "is no JSON"),
        ({"title": "a" * 70_000}, "at most 65536 bytes. Given: 700"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(
    schema: Any, named: str, compiler: GrammarCompiler
) -> None:
    """No part of a schema is ignored."""
    with pytest.raises(RequestError) as refused:
        compiled(compiler, schema)
    assert named in str(refused.value)
    assert refused.value.param == "response_format"


@pytest.mark.alone  # it is about seconds
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_schema_costs_a_bounded_time(
    name: str, compiler: GrammarCompiler, embedded: Checkpoint, engines: EngineFactory
) -> None:
    """A bound holds for the time of a refusal, and of an answer beside a neighbour."""
    began = time.monotonic()
    try:
        grammar = compiled(compiler, HOSTILE[name])
    except RequestError:
        grammar = None
    assert time.monotonic() - began < BOUNDED_S
    if grammar is None:
        return
    began = time.monotonic()
    requests = [held_to(grammar, embedded, seed=seed, max_tokens=40) for seed in range(2)]
    answer(engines.over(embedded), *requests, held_to(None, embedded, max_tokens=40))
    assert time.monotonic() - began < BOUNDED_S


def test_a_compile_that_takes_too_long_is_killed(embedded: Checkpoint) -> None:
    """The compiler is free again after a compile that took too long."""
    compiler = GrammarCompiler(embedded.tokenizer, seconds=0.01)
    with pytest.raises(RequestError, match=r"longer than 0.01 seconds to compile"):
        compiled(compiler, ANY_OBJECT)
    assert compiler._num_waiting == 0


def test_a_schema_is_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar is kept as long as it is among the last ones."""
    kept = compiled(compiler, {"const": "kept"})
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_pool", None)
        assert compiled(compiler, {"const": "kept"}) is kept
    monkeypatch.setattr(compiler, "_try", lambda *_: None)
    _fill(compiler, range(grammar_module._NUM_KEPT))
    assert len(compiler._kept) == grammar_module._NUM_KEPT
    assert compiled(compiler, {"const": "kept"}) is not kept


def _fill(compiler: GrammarCompiler, values: Sequence[int]) -> None:
    for value in values:
        compiled(compiler, {"const": value})


def test_only_so_many_schemas_wait(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One schema too many is refused with a QueueFullError, so the client can retry."""
    monkeypatch.setattr(grammar_module, "_MAX_WAITING", 0)
    with pytest.raises(QueueFullError, match="schemas wait"):
        compiled(compiler, {"const": "one too many"})
