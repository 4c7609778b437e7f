"""A model's forward as a list of launches, beside its own modules; kernels are interpreted."""

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.launch import is_interpreted
from ropewalk.model_runtime.gpu.program import launches
from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward, flat_forward
from ropewalk.model_runtime.gpu.rms_norm import GpuRmsNorm
from ropewalk.model_runtime.loading.install_forward import install_known
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Linear, Profile, ReRope, Unscaled
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import tiny_checkpoint
from tests.oracles.triton_attention import load_as_on_a_gpu

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="tests/gpu serves compiled kernels")
PAGE, NUM_PAGES, MAX_LEN = 16, 18, 96
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
PLAIN = Profile(Unscaled())
# A table for each length, and a position method, whose parts are merged by torch.
PROFILES = (PLAIN, Profile(Linear(factor=2.0)), Profile(Unscaled(), None, ReRope(16)))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_on_a_gpu(monkeypatch)


class Runs:
    """Steps over one cache, by the launches of a model or by its modules."""

    def __init__(self, model: Any) -> None:
        """Take the model over without the comparisons of a load."""
        self.model = model
        native = read_native_rope(model)
        self.plans = patch_model(model, native)
        forward = flat_forward(model, self.plans)
        assert forward is not None
        install_known(model, forward)
        cpu = torch.device("cpu")
        layout = CacheLayout(self.plans, torch.float32, PAGE)
        store = KVCache(layout, NUM_PAGES, cpu, row_keys=True)
        tables = RopeTables(native, PAGE, MAX_LEN, cpu)
        self.table_ids = [tables.id_of(each) for each in PROFILES]
        self.runner = ModelRunner(model, self.plans, store, tables, PAGE, backend=TritonAttention)

    def logits(self, spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits by launches, and by modules."""
        flat = self.model.forward
        assert type(flat) is FlatForward
        by_launches = self.runner.run(spans).clone()
        del self.model.forward
        try:
            return by_launches, self.runner.run(spans)
        finally:
            self.model.forward = flat

    def steps(self, draw: random.Random, count: int, num_tables: int) -> list[list[Span]]:
        """Steps of new prompts, further chunks and decodes, with logits of some rows."""
        steps, lengths = [], [0] * num_tables
        each_has = NUM_PAGES // num_tables
        for _ in range(count):
            spans = []
            for at in draw.sample(range(num_tables), draw.choice((1, num_tables))):
                num = draw.choice((1, draw.randint(2, 12))) if lengths[at] else 20
                pages = range(at * each_has, (at + 1) * each_has)
                tokens = [draw.randrange(2, 150) for _ in range(num)]
                rows = draw.choice((range(num - 1, num), range(num)))
                table = self.table_ids[at]
                spans.append(Span(tokens, lengths[at], pages, table, rows))
                lengths[at] += num
            steps.append(spans)
        return steps


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3",  # norms of heads
        "phi3",  # one weight for queries, keys and values
        "granite",  # constants before sums
        "olmo2",  # no norm before attention
        "mixtral",  # modules that are called as a whole
        "starcoder2",  # biases
    ],
)
def test_a_load_finds_that_launches_compute_what_modules_compute(architecture: str) -> None:
    """The self-check compares both over prompts, chunks and decodes."""
    made = tiny_checkpoint(architecture, num_hidden_layers=1, **HEADS)
    assert type(made.model.forward) is FlatForward


def test_steps_under_several_tables_are_those_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks, decodes and pruned last layers, with three tables in a step.

    Gemma 2 has norms of outputs, windows, a soft cap, and a constant after the embedding. The first
    layer of a kind prepares its launches; under a method each layer does. The first layer of all
    has its own places in memory, because the embedding has a tensor.
    """
    runs = Runs(tiny_model("gemma2", num_hidden_layers=4, **HEADS))
    for spans in runs.steps(random.Random(7), 3, len(PROFILES)):
        got, expected = runs.logits(spans)
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    reads: list[object] = []
    read = TritonAttention.read
    monkeypatch.setattr(
        TritonAttention, "read", lambda self, each: reads.append(each) or read(self, each)
    )
    for table, num_reads in ((0, 3), (2, len(runs.plans))):
        reads.clear()
        runs.runner.run([Span([5, 6], 0, range(NUM_PAGES), runs.table_ids[table], range(2))])
        assert len(reads) == num_reads


def test_a_list_with_other_logits_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check compares it with the modules, which then serve."""
    served = launches.normalize_into

    def without_residual(*args: Any, **named: Any) -> None:
        if named.get("residual_RC") is not None:
            named["residual_RC"] = torch.zeros_like(named["residual_RC"])
        served(*args, **named)

    monkeypatch.setattr(launches, "normalize_into", without_residual)
    assert "forward" not in vars(tiny_checkpoint("llama", num_hidden_layers=1, **HEADS).model)


def test_a_model_without_launches_has_norms_of_one_kernel() -> None:
    """Ministral 3 multiplies queries by a number of their position."""
    model = tiny_checkpoint("ministral3", num_hidden_layers=1, **HEADS).model
    assert "forward" not in vars(model)
    assert any(isinstance(each, GpuRmsNorm) for each in model.modules())
