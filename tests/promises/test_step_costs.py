"""The cost of a decode step in counts, because counts are the same on a busy machine.

The bounds are the counts found when they were written, plus a little room. A change that exceeds a
bound raises it here, where a reviewer sees it.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.engines import deployment_of, request
from tests.doubles.scripted_model import Script

CONFIG = EngineConfig(kv_cache_tokens=8192, max_model_len=1024)
LAYERS = 4
# Those that only move what is there; where one gives a view instead, it is not counted.
COPIES = {
    *("clone", "copy_", "_to_copy", "to", "contiguous", "reshape", "index", "index_select"),
    *("gather", "cat", "stack", "pad", "repeat", "repeat_interleave"),
}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.5}


@dataclass
class Counted:
    """Counts of torch's operators, allocations, copies and bytes."""

    calls: Counter[str] = field(default_factory=Counter)
    num_allocations: int = 0
    num_copies: int = 0
    num_bytes: int = 0  # allocated


class Counting(TorchDispatchMode):
    """Counts operator calls of its thread, and the memory that they take."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator and count its new storages."""
        there = {storage(each) for each in tree_leaves((args, kwargs)) if is_tensor(each)}
        answer = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.counted.calls[name] += 1
        for each in tree_leaves(answer):
            if is_tensor(each) and storage(each) not in there:
                self.counted.num_allocations += 1
                self.counted.num_copies += name in COPIES
                self.counted.num_bytes += each.untyped_storage().nbytes()
        return answer


def is_tensor(thing: object) -> bool:
    """Whether it has a storage; the storage of packed weights cannot be read."""
    return isinstance(thing, torch.Tensor) and thing.layout is torch.strided


def storage(tensor: torch.Tensor) -> int:
    """The address of its memory."""
    return tensor.untyped_storage().data_ptr()


def decoding(
    checkpoint: Checkpoint, runner: Any, batch: int, num_prompt: int, **sampling: Any
) -> EngineCore:
    """A core without a thread whose sequences have all ended their prefill."""
    core = EngineCore(runner, CONFIG, Observer())
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 16.0})
    for at in range(batch):
        prompt = [(3 * at + 7 * place) % VOCAB_SIZE for place in range(num_prompt)]
        asked = request(deployment, prompt, max_tokens=30, **sampling)
        core.add(RequestState.of(asked, checkpoint.tokenizer, frozenset(), lambda _: None))
    while not core.scheduler.running or core.scheduler.waiting or reading(core):
        core.step()
    core.step()  # what is made once is made
    return core


def reading(core: EngineCore) -> bool:
    """Whether a prompt is still in its prefill."""
    return not all(sequence.is_decoding for sequence in core.scheduler.running)


def counted_step(core: EngineCore, batch: int) -> Counted:
    """The counts of one step of all sequences."""
    with Counting() as counting:
        assert core.step() == batch
    assert len(core.scheduler.running) == batch, "the step failed"
    return counting.counted


@pytest.fixture
def runner(llama_checkpoint: Checkpoint) -> ModelRunner:
    """A runner over a cache of its own."""
    return build_runner(llama_checkpoint, CONFIG)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_decode_step_is_one_forward_and_a_bounded_number_of_operators(
    llama_checkpoint: Checkpoint, runner: ModelRunner, batch: int
) -> None:
    """The bounds hold for every batch size, so a forward or operator per sequence fails."""
    core = decoding(llama_checkpoint, runner, batch, 20)
    forwards: list[int] = []
    hook = llama_checkpoint.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    counted = counted_step(core, batch)
    hook.remove()
    assert len(forwards) == 1
    assert counted.calls.total() <= 700, counted.calls
    assert counted.num_allocations <= 210, counted.calls
    assert counted.num_copies <= 50, counted.calls


def test_a_decode_step_has_no_operator_for_packed_sequences(
    llama_checkpoint: Checkpoint, runner: ModelRunner
) -> None:
    """The step has no search of transformers for packed sequences and no identity rotation."""
    counted = counted_step(decoding(llama_checkpoint, runner, 8, 20), 8)
    assert not {"diff", "cumsum", "neg", "cat"} & set(counted.calls), counted.calls


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}, {"logprobs": 2}], ids=str)
def test_a_long_context_costs_no_operator_and_no_byte_more(
    llama_checkpoint: Checkpoint, sampling: dict[str, Any]
) -> None:
    """The test catches a gathered context, a mask as long as it, and a cache that is copied."""
    found = []
    for num_prompt in (40, 700):
        core = decoding(
            llama_checkpoint, build_runner(llama_checkpoint, CONFIG), 2, num_prompt, **sampling
        )
        found.append(counted_step(core, 2))
    assert found[0] == found[1]


def test_the_cache_stays_where_it_is(llama_checkpoint: Checkpoint, runner: ModelRunner) -> None:
    """Writing a page keeps its storage, and no step allocates as much as the cache."""
    store = runner._store

    def places() -> list[int]:
        return [storage(each) for layer in range(LAYERS) for each in store.pages(layer)]

    before = places()
    assert len(set(before)) == 2 * LAYERS
    core = decoding(llama_checkpoint, runner, 8, 60)
    least = min(each.untyped_storage().nbytes() for each in store.pages(0))
    for _ in range(5):
        assert counted_step(core, 8).num_bytes < least
    assert places() == before
    page = core.scheduler.running[0].pages[0]
    assert all(store.pages(layer)[0][page].any() for layer in range(LAYERS)), "nothing was written"


def test_penalties_count_what_is_new(llama_checkpoint: Checkpoint, runner: ModelRunner) -> None:
    """Counting the whole answer again would take more than four copies of the logits."""
    plain = counted_step(decoding(llama_checkpoint, runner, 8, 20), 8)
    penalised = counted_step(decoding(llama_checkpoint, runner, 8, 20, **PENALTIES), 8)
    rows = 8 * VOCAB_SIZE * 4  # one copy of the logits, in bytes
    assert penalised.num_bytes - plain.num_bytes < 4 * rows


class Calls:
    """Counts Python's own calls of its thread, as a profiler's hook."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """A profiler's hook."""
        self.num += event == "call"

    def of(self, core: EngineCore, batch: int) -> int:
        """The number of calls in one step."""
        self.num = 0
        sys.setprofile(self)
        try:
            assert core.step() == batch
        finally:
            sys.setprofile(None)
        assert len(core.scheduler.running) == batch, "the step failed"
        return self.num


@pytest.mark.parametrize("num_prompt", [1, 600])
def test_the_engines_own_work_is_bounded_by_the_sequences(
    llama_checkpoint: Checkpoint, num_prompt: int
) -> None:
    """The bound catches Python loops over tokens, pages or pairs of sequences."""
    calls = {}
    for batch in (1, 4, 12):
        core = decoding(llama_checkpoint, Silent(llama_checkpoint, "x"), batch, num_prompt)
        calls[batch] = Calls().of(core, batch)
    assert calls[1] <= 125
    assert (calls[4] - calls[1]) / 3 <= 30
    assert (calls[12] - calls[4]) / 8 <= 30


class Silent(Script):
    """A scripted model that makes no counted calls of its own."""

    def run(self, spans: Sequence[Any]) -> torch.Tensor:
        """Return the same row for all."""
        return torch.zeros(sum(len(span.logit_rows) for span in spans), VOCAB_SIZE)
