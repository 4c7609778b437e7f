"""Pages in few bits: what a query reads, and when (test_any_serving.py has the promise for them).

A query reads earlier pages quantised and its own page exact. Nothing else decides.
"""

from typing import Any

import pytest

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.quantised.cache import QuantisedCache
from ropewalk.model_runtime.attention.quantised.cpu_backend import QuantisedCpuAttention
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import (
    EngineFactory,
    answer,
    checkpoint_of,
    deployment_of,
    groups_of,
    random_tokens,
    request,
    tiny_checkpoint,
)
from tests.oracles.quantised_mutants import ReadAfterTheStep, ReadAtTheWrite
from tests.oracles.quantised_reference import BITS, ReferenceModel

pytestmark = pytest.mark.usefixtures("small_groups")

PAGE = 32
WHOLE = {"kv_cache_tokens": 4096, "max_model_len": 256, "page_size": PAGE}


@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_without_memory_writes_no_tail_page_twice(
    engines: EngineFactory,
    llama_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    """Layers up to this one have begun their next tail page when the older prompt's step fails."""
    deployment = deployment_of(llama_checkpoint)
    asked = [
        request(deployment, random_tokens(num, num), max_tokens=8, logprobs=2) for num in (150, 60)
    ]
    expected = engines.alone(llama_checkpoint, asked, **WHOLE, kv_cache_dtype="int4")
    engine = engines.over(
        llama_checkpoint, **WHOLE, kv_cache_dtype="int4", max_num_batched_tokens=50
    )
    prepare, write = engine._core._runner.prepare, QuantisedCpuAttention.write_columns
    num_writes: list[int] = []  # of the step that fails

    def prepared(spans: list[Span]) -> Any:
        first = spans[0].first_position % PAGE
        crosses = first and first + len(spans[0].token_ids) > PAGE
        forward = prepare(spans)
        if len(spans) < 2 or not crosses or num_writes:
            return forward

        def run() -> Any:
            num_writes.append(0)
            with monkeypatch.context() as patch:
                patch.setattr(QuantisedCpuAttention, "write_columns", failing)
                return forward()

        return run

    def failing(*arguments: Any) -> None:
        write(*arguments)
        num_writes[0] += 1
        if num_writes[0] > layer:
            raise MemoryError

    monkeypatch.setattr(engine._core._runner, "prepare", prepared)
    assert answer(engine, *asked) == expected
    assert num_writes == [layer + 1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("llama", each) for each in BITS), ("qwen2", "int8"), ("qwen3", "k8v4"), ("gemma2", "int4")],
)
def test_logprobs_equal_transformers_over_quantised_pages(
    engines: EngineFactory, name: str, kind: str
) -> None:
    """The untouched model in float64, whose cache numpy quantises (quantised_reference.py)."""
    model = tiny_model(name, max_position_embeddings=256)
    prompt = random_tokens(130, 2)
    expected = ReferenceModel(tiny_model(name, max_position_embeddings=256), kind, PAGE).logprobs(
        prompt
    )
    checkpoint = checkpoint_of(model)
    deployment = deployment_of(checkpoint)
    engine = engines.over(checkpoint, **WHOLE, kv_cache_dtype=kind)
    (result,) = answer(engine, request(deployment, prompt, max_tokens=1, prompt_logprobs=1))
    got = result.prompt_logprob_values()
    wanted = [float(expected[at, token]) for at, token in enumerate(prompt[1:])]
    # A number half-way between two codes may round to the other one in float32.
    errors = sorted(abs(a - b) for a, b in zip(got, wanted, strict=True))
    assert errors[len(errors) // 2] < 1e-3
    assert errors[-1] < 0.3


def test_other_times_to_quantise_would_change_answers(
    engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise of any serving would see both mistakes, in layers with a window, too."""
    checkpoint = tiny_checkpoint("mistral", sliding_window=40)
    scaling = {"rope_type": "yarn", "factor": 4.0}
    deployment = deployment_of(checkpoint, rope_scaling=scaling, rope_policy="fixed")
    asked = request(deployment, random_tokens(200, 1), max_tokens=20, logprobs=3)
    config = {**WHOLE, "kv_cache_dtype": "int4", "page_groups": groups_of(checkpoint)}
    for backend in (ReadAfterTheStep, ReadAtTheWrite):
        monkeypatch.setattr(QuantisedCache, "own_backend", lambda _, own=backend: own)
        answers = [
            answer(engines.over(checkpoint, **config, max_num_batched_tokens=chunk), asked)
            for chunk in (300, 7)
        ]
        assert answers[0] != answers[1]


def test_pages_of_windows_take_the_bytes_of_their_groups(engines: EngineFactory) -> None:
    """Layers of all groups share quantised pages, and each has tail pages of its own."""
    checkpoint = tiny_checkpoint("gemma3_text")
    groups = groups_of(checkpoint)
    assert groups.num_groups == len(checkpoint.plans) == 4  # of which three have windows
    for kind in BITS:
        limits = {**WHOLE, "max_num_seqs": 3, "kv_cache_tokens": 256, "kv_cache_dtype": kind}
        grouped = engines.over(checkpoint, page_groups=groups, **limits)._core._runner.store
        whole = engines.over(checkpoint, **limits)._core._runner.store
        assert grouped.num_pages == 4 * whole.num_pages
        assert grouped.num_bytes == whole.num_bytes
