"""A cache in few bits in the plan, the banner, `inspect` and the refusals."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.quantised.own_pages import own_pages
from ropewalk.model_runtime.attention.quantised.page_format import most_staged
from ropewalk.model_runtime.attention.quantised.torch_backend import QuantisedTorchAttention
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.loading.model_config import KVShape, ModelConfig
from ropewalk.server.settings.load import ServeSettings, SettingsError, load_settings
from ropewalk.server.startup.planning.banner_lines import describe
from ropewalk.server.startup.planning.dry_run import outlook_of, refuse_ahead
from ropewalk.server.startup.planning.serving_plan import ModelFacts, ServingPlan, plan_serving
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.planned import model_facts

GIB, MIB = 2**30, 2**20


def planned(embedded: Checkpoint, **settings: str) -> ServingPlan:
    """A plan for 30 layers of 3 heads of 64 dimensions, which are those of SmolLM2-135M."""
    found = load_settings(settings)
    return plan_serving(found, _facts(found, embedded))


def _facts(settings: ServeSettings, embedded: Checkpoint, **more: Any) -> ModelFacts:
    facts = model_facts(settings, embedded.native, affordable_bytes=4 * GIB, **more)
    layers = dict.fromkeys(range(30), KVShape(3, 64, 64))
    return replace(facts, layout=replace(facts.layout, layers=layers))


@pytest.mark.parametrize(
    ("kind", "num_bytes", "least_ratio"),
    [("int8", 12_240, 3.6), ("k8v4", 9_720, 4.5), ("int4", 6_840, 6.5)],
)
def test_a_gib_holds_more_tokens(
    embedded: Checkpoint, kind: str, num_bytes: int, least_ratio: float
) -> None:
    """Tail pages count: 2.8 MiB for each sequence."""
    size = {"kv_cache_gib": "1", "max_num_seqs": "8"}
    exact, few = planned(embedded, **size), planned(embedded, **size, kv_cache_dtype=kind)
    assert few.layout.token_bytes == num_bytes
    parts = few.cache_parts
    assert parts["open"] == 8 * 64 * 46_080
    assert parts["stage"] == (8 + (2048 - 16) // 64) * 64 * 1536  # of one layer
    assert few.capacity >= least_ratio * exact.capacity
    assert GIB - 64 * num_bytes < few.cache_bytes <= GIB
    assert list(parts) == ["pages", "open", "stage"]
    assert sum(parts.values()) == few.cache_bytes
    line = describe(few)[-1]
    assert line.startswith(f"    format         {kind}, {num_bytes} bytes a token (auto: 46080); ")
    assert line.endswith(
        "22.5 MiB of tail pages for 8 sequences, 3.66 MiB of pages that a step fills"
    )


def test_tail_pages_that_leave_no_room_are_refused(embedded: Checkpoint) -> None:
    """The sentence names both settings."""
    message = r"kv_cache_gib: must have .* beside 90 MiB of tail pages for 32 sequences \(max_num_s"
    with pytest.raises(SettingsError, match=message):
        planned(embedded, kv_cache_gib="0.05", kv_cache_dtype="int4")


def test_the_dry_run_refuses_what_a_load_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do the checks before a load; the format knows the dimensions of the layers' values."""
    monkeypatch.setattr(ModelConfig, "layers", lambda _: {0: KVShape(3, 64, 15)})
    settings = load_settings({"kv_cache_dtype": "k8v4"})
    for plans in (outlook_of, refuse_ahead):
        with pytest.raises(ModelError, match="a layer of this model has 15: use int8 or auto"):
            plans(settings)


def test_eight_bits_are_the_other_format_of_a_gpu(embedded: Checkpoint) -> None:
    """A plan for a GPU has the bytes of one for a CPU, a quarter of float32."""
    settings = load_settings({"kv_cache_dtype": "fixed8", "kv_cache_gib": "1"})
    plans = [
        plan_serving(settings, _facts(settings, embedded, gpu_bytes=total))
        for total in (80 * GIB, None)
    ]
    assert plans[0].cache_parts == plans[1].cache_parts
    assert list(plans[0].cache_parts) == ["pages"]
    assert describe(plans[0])[-1] == describe(plans[1])[-1]
    assert describe(plans[1])[-1] == (
        "    format         fixed8, 11520 bytes a token (auto: 46080); scales are those of the "
        "self-check's text"
    )


def test_a_processor_without_kernels_is_served_by_the_reference(
    embedded: Checkpoint, engines: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are those of the kernels within rounding."""
    prompt = [(7 * at) % 2048 for at in range(150)]
    asked = request(deployment_of(embedded), prompt, max_tokens=1, prompt_logprobs=1)
    limits = {"page_size": 32, "kv_cache_dtype": "k8v4", "max_num_batched_tokens": 70}
    expected = answer(engines.over(embedded, **limits), asked)[0]
    monkeypatch.setattr("ropewalk.model_runtime.runner.backends.cpu_fault", lambda: "no numba")
    engine = engines.over(embedded, **limits)
    assert engine._core._runner._backend is QuantisedTorchAttention
    pairs = zip(
        answer(engine, asked)[0].prompt_logprob_values(),
        expected.prompt_logprob_values(),
        strict=True,
    )
    errors = sorted(abs(a - b) for a, b in pairs)
    # A number half-way between two codes may round to the other one.
    assert errors[len(errors) // 2] < 1e-3
    assert errors[-1] < 0.1


def test_resident_tensors_are_what_the_plan_counts(
    embedded: Checkpoint, engines: EngineFactory
) -> None:
    """Quantised and tail pages of an engine, to the byte."""
    engine = engines.over(
        embedded, page_size=64, kv_cache_dtype="int4", kv_cache_tokens=4096, max_num_seqs=5
    )
    layout = embedded.cache_layout(64, "int4")
    counted = 4096 * layout.token_bytes + 5 * layout.tail_bytes
    assert engine._core._runner.store.num_bytes == counted


def test_bfloat16_holds_twice_the_tokens_of_float32(embedded: Checkpoint) -> None:
    """No page is quantised, so nothing is held beside the pages."""
    exact = planned(embedded, kv_cache_gib="1")
    few = planned(embedded, kv_cache_gib="1", kv_cache_dtype="bfloat16")
    assert (few.layout.token_bytes, list(few.cache_parts)) == (23_040, ["pages"])
    assert 0 <= few.capacity - 2 * exact.capacity <= 64
    assert describe(few)[-1] == (
        "    format         bfloat16, 23040 bytes a token (auto: 46080); keys and values are "
        "rounded when they are written"
    )


def test_bfloat16_for_a_model_in_bfloat16_is_told_to_be_auto() -> None:
    """The dry run reads the number type of the model."""
    plan = outlook_of(load_settings({"kv_cache_dtype": "bfloat16", "dtype": "bfloat16"})).plan
    exact = outlook_of(load_settings({"dtype": "bfloat16"})).plan
    assert plan.layout.token_bytes == exact.layout.token_bytes
    line = "    format         bfloat16, the numbers of the model: the same as auto"
    assert line in describe(plan)
    assert not any("format" in each for each in describe(exact))


@pytest.mark.parametrize("most", [1, 2, 3, 31, 64, 65, 66, 97, 130])
@pytest.mark.parametrize("num_sequences", [1, 2, 3])
def test_the_plan_counts_the_most_pages_that_a_step_stages(most: int, num_sequences: int) -> None:
    """Of every way to give a step's tokens to sequences, the worst; the batch builder counts."""
    device = torch.device("cpu")
    store: Any = SimpleNamespace(page_size=32, most_numbers=1, dtype=torch.float32, device=device)
    worst = 0
    for counts in product(range(most + 1), repeat=num_sequences):
        if sum(counts) != most:
            continue
        spans = [
            Span([0] * num, first, [0] * 9, 0, range(0), tail_page=0)
            for num in counts
            for first in [31]  # of a page: the worst place to begin
            if num
        ]
        worst = max(worst, len(own_pages(spans, store).staged))
    assert worst == most_staged(most, num_sequences, 32)
