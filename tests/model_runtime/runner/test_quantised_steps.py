"""Steps over quantised pages: on a device that runs them later, and by a GPU's kernels."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention import work_list
from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.quantised.cpu_backend import QuantisedCpuAttention
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.page_groups import ONE_GROUP, PageGroups
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Linear, Profile, ReRope, Unscaled
from tests.checkpoints.tiny_models import VOCAB_SIZE, tiny_model
from tests.doubles.deferred_runner import device_of
from tests.doubles.engines import groups_of, tiny_checkpoint
from tests.doubles.random_workloads import check, serve, workload
from tests.doubles.recorded_runners import Again
from tests.oracles.draft_adversary import Counted, tell, use_adversary
from tests.oracles.quantised_reads import use_small_groups
from tests.oracles.quantised_reference import ReferenceModel
from tests.oracles.triton_attention import use_triton

PAGE = 32
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
FEW = {"page_size": PAGE, "kv_cache_tokens": 9 * PAGE, "max_num_batched_tokens": 70}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_groups(monkeypatch)


def test_tail_pages_are_right_one_step_ahead_of_the_host(
    llama_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end, are aborted and preempted while a later step of theirs is launched.

    Their tail pages are others' by then. Rows of drafts share one.
    """
    adversary, counted, num_followed = use_adversary(monkeypatch), Counted(), 0
    monkeypatch.setattr(adversary, "share_silent", 0.7)
    limits = {**FEW, "kv_cache_dtype": "k8v4"}
    for seed in range(4):
        work = workload(llama_checkpoint, seed)
        expected, _ = serve(llama_checkpoint, work, is_ahead=False, **limits)
        results = expected.results()
        requests = [each for arrived in work.arrivals.values() for each in arrived]
        tell(adversary, seed, 0.8, [(each, results[each.request_id]) for each in requests])
        answers, core = serve(
            llama_checkpoint, work, is_ahead=True, max_draft_tokens=7, observer=counted, **limits
        )
        num_followed += device_of(core).num_followed
        check(answers, expected)
    assert num_followed > 30, "the engine was hardly ever ahead"
    assert 20 < counted.num_accepted < counted.num_drafted


def runner_over(
    checkpoint: Checkpoint,
    kind: str,
    profiles: Sequence[Profile],
    groups: PageGroups = ONE_GROUP,
) -> ModelRunner:
    """A runner with room for four sequences of four pages, and spare pages."""
    config = EngineConfig(
        kv_cache_tokens=17 * PAGE,
        max_model_len=4 * PAGE,
        page_size=PAGE,
        kv_cache_dtype=kind,
        max_num_seqs=5,
        num_rope_tables=len(profiles),
        page_groups=groups,
    )
    return build_runner(checkpoint, config, profiles)


class Talk:
    """Sequences of one runner, each under a profile of its own."""

    def __init__(self, runner: ModelRunner, profiles: Sequence[Profile]) -> None:
        self.runner = runner
        self.tables = [runner.table_id(each) for each in profiles]
        self.lens = [0] * len(profiles)

    def step(self, num_tokens: dict[int, int]) -> Tensor:
        """The logits of all tokens of a step, by its numbers of tokens."""
        spans = []
        for index, count in num_tokens.items():
            first = self.lens[index]
            tokens = [(index * 31 + at * 7) % VOCAB_SIZE for at in range(first, first + count)]
            num_pages = 4 * self.runner.store.num_groups
            pages = list(range(num_pages * index, num_pages * (index + 1)))
            rows = range(count)
            spans.append(
                Span(tokens, first, pages, self.tables[index], rows, tail_page=(index + 1) % 4)
            )
            self.lens[index] += count
        return self.runner.run(spans).clone()


def test_recorded_steps_quantise_and_read_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks over pages, then decodes that fill a page, begin the next one, and are padded.

    A CPU's own kernels are beside them, under a table and a position method.
    """
    pytest.importorskip("triton", reason="triton is for Linux on x86-64")
    made = tiny_checkpoint("llama", num_hidden_layers=1, **HEADS)
    monkeypatch.setattr(work_list, "_LEAST_TILES", 1)  # contexts of several pieces
    profiles = [Profile(Linear(factor=4.0)), Profile(Unscaled(), None, ReRope(24))]
    talks = [Talk(runner_over(made, "k8v4", profiles), profiles)]
    assert talks[0].runner._backend is QuantisedCpuAttention
    use_triton(monkeypatch)
    talks += [Talk(runner_over(made, "k8v4", profiles), profiles) for _ in range(2)]
    record = Again()
    talks[2].runner.capture_graphs(CaptureLimits(4 * PAGE, 3, 16), record)
    steps = [{0: 20, 1: 31}, {0: 20}, {0: 1, 1: 1}, {1: 1}, {1: 1, 0: 1}]
    for step in steps:
        on_cpu, queued, recorded = (talk.step(step) for talk in talks)
        torch.testing.assert_close(queued, on_cpu, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(recorded, queued, atol=1e-5, rtol=1e-5)
    assert record.num_replayed == 3
    full = [0, 4]
    exact, *others = (talk.runner.store.page_memory()[0][full] for talk in talks)
    for each in others:
        # A key whose product was rounded otherwise may have the next code.
        assert (each != exact).mean() < 0.01
    stores = [talk.runner.store.page_memory()[0][:16] for talk in talks[1:]]
    assert (stores[0] == stores[1]).all(), "padding touched a sequence's page"


@pytest.mark.parametrize(
    ("name", "kind", "is_held"), [("llama", "int4", False), ("gemma2", "k8v4", True)]
)
def test_logits_equal_transformers_over_quantised_pages(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch, *, is_held: bool
) -> None:
    """The untouched model in float64, whose cache numpy quantises (quantised_reference.py).

    The layer with a window has a group of pages of its own, or not.
    """
    pytest.importorskip("triton", reason="triton is for Linux on x86-64")
    num_layers = 1 if name == "llama" else 2  # one has a window
    sizes: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 256,
        **HEADS,
    }
    expected = ReferenceModel(tiny_model(name, **sizes), kind, PAGE).logprobs(
        [at * 7 % VOCAB_SIZE for at in range(45)]
    )
    made = tiny_checkpoint(name, **sizes)
    use_triton(monkeypatch)
    profiles = [Profile(Unscaled())]
    groups = groups_of(made) if is_held else ONE_GROUP
    talk = Talk(runner_over(made, kind, profiles, groups), profiles)
    got = torch.cat([talk.step({0: num}) for num in (20, 20, 1, 4)])
    errors = (torch.log_softmax(got.double(), -1) - expected).abs().amax(-1)
    # A number half-way between two codes may round to the other one in float32.
    assert float(errors.median()) < 1e-3
    assert float(errors.max()) < 0.3
