"""Steps over pages of groups of layers: the logits of pages of all layers, by every backend.

Pages that no query reads hold NaN, as they may once another sequence has them.
"""

from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span, build_batch
from ropewalk.model_runtime.attention.paged_attention import Backend
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.cpu_kernels import fused_decode
from ropewalk.model_runtime.cpu_kernels.attention import attention
from ropewalk.model_runtime.cpu_kernels.threads import _by_items, _runner
from ropewalk.model_runtime.engine.build_engine import build_runner, warm_up
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.page_groups import ONE_GROUP, PageGroups
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.scheduling.sequence import HOLE
from ropewalk.rope import Profile, ReRope, Sinks, Unscaled
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import tiny_checkpoint
from tests.doubles.recorded_runners import Again

PAGE, WINDOW, NUM = 8, 24, 20  # NUM: pages of positions of a sequence
CONFIG = EngineConfig(kv_cache_tokens=4 * NUM * PAGE, max_model_len=NUM * PAGE, page_size=PAGE)
GROUPS = PageGroups(((3,), (0,), (1,), (2,)), (None, *[WINDOW] * 3))
STEPS = [range(40), range(40, 41), range(41, 97), range(97, 98), range(98, 99), range(99, 104)]
# All layers of the second model read a window, so they are one group, whose table has holes.
MODELS = {"gemma3_text": GROUPS, "mistral": PageGroups(((0, 1, 2, 3),), (WINDOW,))}
METHODS = [None, ReRope(20), Sinks(4, 30)]
# Sinks are not served where layers rotate otherwise.
SERVED = [each for each in product(MODELS, METHODS) if each != ("gemma3_text", METHODS[2])]
# A minute and a half in the interpreter.
TRITON = [pytest.param("triton", *each, marks=pytest.mark.long) for each in SERVED]
CASES = [
    *(("device", *each) for each in SERVED if each != ("gemma3_text", METHODS[1])),
    ("torch", "gemma3_text", METHODS[1]), ("torch", "mistral", None),
]  # fmt: skip
# The CPU's lists of ranges are made for each step, so its recorded steps have no method.
RECORDED = [("device", name, None) for name in MODELS]


class Pages:
    """The page tables of two sequences, one with holes where no group reads."""

    def __init__(self, runner: ModelRunner) -> None:
        self.store = runner.store
        num_groups = self.store.num_groups
        numbers = np.random.default_rng(0).permutation(2 * NUM * num_groups)
        self.rows = [each.tolist() for each in numbers.reshape(2, -1)]
        self.num_groups = num_groups

    def at(self, sequence: int, step: range, num_last: int | None) -> list[int]:
        """The pages that a step needs; the others of a group with a window hold NaN."""
        pages = list(self.rows[sequence])
        if not self.store.layout.groups.has_windows:
            return pages
        for group, window in enumerate(self.store.layout.groups.windows):
            first = 0 if window is None else max(0, (step.start + 1 - window) // PAGE)
            begin = 0
            if window is None and num_last is not None:
                begin, first = 1, max(0, (step.start + 1 - num_last) // PAGE)
            for at in range(begin, first):
                self._poison(pages[at * self.num_groups + group])
                pages[at * self.num_groups + group] = HOLE
        return pages

    def _poison(self, page: int) -> None:
        for layer in range(4):
            for each in self.store.pages(layer):
                each[page] = torch.nan


def logits(runner: ModelRunner, method: object) -> list[Tensor]:
    """The logits of steps of two sequences, one of which is a step behind."""
    profile = Profile(Unscaled(), positions=method)  # type: ignore[arg-type]
    pages, found = Pages(runner), []
    num_last = 30 if isinstance(method, Sinks) else None
    tokens = [(at * 37) % VOCAB_SIZE for at in range(NUM * PAGE)]
    table_id = runner.table_id(profile)
    for at, step in enumerate(STEPS):
        spans = []
        for sequence, own in enumerate([step, *STEPS[at - 1 : at]]):
            ids = [tokens[position] for position in own]
            row = pages.at(sequence, own, num_last)
            spans.append(Span(ids, own.start, row, table_id, range(len(own) - 1, len(own))))
        found.append(runner.run(spans).clone())
    return found


@cache
def checkpoint_of(name: str) -> Checkpoint:
    """A taken-over tiny model."""
    return tiny_checkpoint(name)


def runner_of(
    groups: PageGroups,
    method: object,
    backend: type[Backend] | None = None,
    name: str = "gemma3_text",
) -> ModelRunner:
    """A runner of a tiny model; one page more than its sequences need."""
    config = EngineConfig(
        kv_cache_tokens=CONFIG.kv_cache_tokens + PAGE,
        max_model_len=CONFIG.max_model_len,
        page_size=PAGE,
        page_groups=groups,
    )
    profile = Profile(Unscaled(), positions=method)  # type: ignore[arg-type]
    make = partial(ModelRunner, backend=backend) if backend else ModelRunner
    return build_runner(checkpoint_of(name), config, [profile], make)


def backend_of(kind: str) -> type[Backend] | None:
    """The class of a backend; None: that of the device."""
    if kind == "triton":
        pytest.importorskip("triton", reason="triton is for Linux on x86-64")
        if torch.cuda.is_available():
            pytest.skip("kernels are not interpreted here")
        from ropewalk.model_runtime.gpu.backend import TritonAttention

        return TritonAttention
    return TorchAttention if kind == "torch" else None


@pytest.mark.parametrize(("kind", "name", "method"), [*CASES, *TRITON], ids=str)
def test_logits_have_the_bits_of_pages_of_all_layers(kind: str, name: str, method: object) -> None:
    """Prompts, decodes and both, with a call a layer and with one call a step."""
    backend = backend_of(kind)
    expected = logits(runner_of(ONE_GROUP, method, backend, name), method)
    found = logits(runner_of(MODELS[name], method, backend, name), method)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    assert all(bool(each.isfinite().all()) for each in found)


@pytest.mark.parametrize("backend", [None, TorchAttention])
def test_sinks_in_some_layers_and_windows_in_others(backend: type[Backend] | None) -> None:
    """Three groups keep sinks and recent tokens, and one its window."""
    more = {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": WINDOW}
    groups = PageGroups(((0,), (1,), (2,), (3,)), (None, None, None, WINDOW))
    checkpoint = tiny_checkpoint("qwen2", **more)
    method = Sinks(4, 30)
    profile = Profile(Unscaled(), positions=method)
    make = partial(ModelRunner, backend=backend) if backend else ModelRunner
    found = []
    for each in (ONE_GROUP, groups):
        config = EngineConfig(
            kv_cache_tokens=CONFIG.kv_cache_tokens,
            max_model_len=CONFIG.max_model_len,
            page_size=PAGE,
            page_groups=each,
        )
        found.append(logits(build_runner(checkpoint, config, [profile], make), method))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


@pytest.mark.parametrize(("kind", "name", "method"), [*RECORDED, *TRITON], ids=str)
def test_recorded_steps_follow_the_tables_of_all_groups(
    kind: str, name: str, method: object
) -> None:
    """A recorded step reads fixed places, where each group has a page table and pages."""
    backend, groups = backend_of(kind), MODELS[name]
    expected = logits(runner_of(ONE_GROUP, method, backend, name), method)
    runner, record = runner_of(groups, method, backend, name), Again()
    spare_page = CONFIG.num_pages * groups.num_groups
    runner.capture_graphs(CaptureLimits(CONFIG.max_model_len, 2, spare_page), record)
    found = logits(runner, method)
    assert record.num_replayed
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def compiled(checkpoint_runner: ModelRunner) -> int:
    """The number of compiled kinds of the kernels that take pages."""
    forward = checkpoint_runner._model.forward
    fused = fused_decode.runner_for(forward.multiplying, fused_decode.EXACT_ACCESS)
    kernels = [attention.write_kv, *map(_runner, (_by_items(attention.attend), fused))]
    return sum(len(each.signatures) for each in kernels)


def test_groups_compile_no_kernel_of_their_own() -> None:
    """Tables of each group have the memory order of one table, so the kernels are the same."""
    runner = runner_of(ONE_GROUP, None)
    logits(runner, None)
    before = compiled(runner)
    grouped = runner_of(GROUPS, None)
    warm_up(grouped, Profile(Unscaled()), 0, EngineConfig(
        kv_cache_tokens=CONFIG.kv_cache_tokens, max_model_len=CONFIG.max_model_len,
        page_size=PAGE, page_groups=GROUPS,
    ))  # fmt: skip
    logits(grouped, None)
    assert compiled(grouped) == before
    spans = [Span([1] * 3, 20, list(range(12)), 0, range(1)) for _ in range(2)]
    batch = build_batch(spans, PAGE, torch.device("cpu"), 4)
    for group in range(4):
        table_SN = batch.of_group(group).page_table_SN.numpy()
        assert table_SN.flags.c_contiguous
        assert table_SN.tolist() == [[group, 4 + group, 8 + group]] * 2
        assert batch.of_group(group).page_T.tolist() == [8 + group] * 6


def test_a_backend_is_made_for_a_group_when_its_first_layer_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is a copy that shares the lists of the step; a step in one call needs none."""
    runner = runner_of(GROUPS, None)
    logits(runner, None)
    made: list[object] = []
    from ropewalk.model_runtime.attention.cpu_backend import CpuAttention

    of_group = CpuAttention.of_group

    def counted(self: CpuAttention, batch: object) -> CpuAttention:
        made.append(batch)
        return of_group(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuAttention, "of_group", counted)
    table_id = runner.table_id(Profile(Unscaled()))
    row = list(range(4 * NUM))
    runner.run([Span([5], 3, row, table_id, range(1))])
    assert not made
    runner.run([Span([5] * 30, 3, row, table_id, range(30))])
    assert len(made) == 3


def test_tensors_are_shared_by_the_layers_of_a_place() -> None:
    """Four groups of one layer: one tensor of keys and one of values."""
    alone, grouped = runner_of(ONE_GROUP, None).store, runner_of(GROUPS, None).store
    assert grouped.num_bytes == alone.num_bytes
    assert grouped.num_pages == 4 * alone.num_pages
    assert len({id(grouped.pages(layer)[0]) for layer in range(4)}) == 1


def test_a_layer_that_reads_more_than_its_group_keeps_is_refused() -> None:
    """A wrong config must not become wrong answers."""
    narrow = PageGroups(GROUPS.layers, (None, *[WINDOW - 1] * 3))
    with pytest.raises(ModelError, match=r"layer 0 reads 24 keys, and the config says 23"):
        runner_of(narrow, None)
    windowed = PageGroups(GROUPS.layers, (WINDOW,) * 4)
    with pytest.raises(ModelError, match=r"layer 3 reads all keys, and the config says 24"):
        runner_of(windowed, None)
