"""What a decode step costs, in counts: they are the same on a busy machine, clocks are not.

The bounds are what was counted when they were written, and a little room. A change that has to go
over one raises it here, where it is seen.
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

from model_runtime.config import EngineConfig
from model_runtime.engine.build_engine import build_runner
from model_runtime.engine.engine_core import EngineCore
from model_runtime.engine.observer import Observer
from model_runtime.engine.output_processor import Answer
from model_runtime.engine.request_state import RequestState
from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.runner.model_runner import ModelRunner
from model_runtime.scheduling.sequence import Sequence as TokenSequence
from tests.engines import deployment_of, request, tiny_checkpoint
from tests.scripted_model import Script
from tests.tiny_models import VOCAB_SIZE

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
    """What torch was asked to do."""

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
        """Call it."""
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
    """Whether it has a storage; packed weights have none that can be asked for."""
    return isinstance(thing, torch.Tensor) and thing.layout is torch.strided


def storage(tensor: torch.Tensor) -> int:
    """Where its memory begins."""
    return tensor.untyped_storage().data_ptr()


def decoding(
    checkpoint: Checkpoint, runner: Any, batch: int, num_prompt: int, **sampling: Any
) -> EngineCore:
    """A core without a thread, all of whose sequences decode from here on."""
    core = EngineCore(runner, CONFIG, Observer())
    deployment = deployment_of(checkpoint, rope_scaling={"rope_type": "yarn", "factor": 16.0})
    for at in range(batch):
        prompt = [(3 * at + 7 * place) % VOCAB_SIZE for place in range(num_prompt)]
        asked = request(deployment, prompt, max_tokens=30, **sampling)
        answer = Answer(asked, checkpoint.tokenizer, frozenset())
        core.add(RequestState(TokenSequence(asked), answer, lambda _: None))
    while not core.scheduler.running or core.scheduler.waiting or reading(core):
        core.step()
    core.step()  # what is made once is made
    return core


def reading(core: EngineCore) -> bool:
    """Whether a prompt is not read to its end."""
    return not all(sequence.is_decoding for sequence in core.scheduler.running)


def counted_step(core: EngineCore, batch: int) -> Counted:
    """One step of all."""
    with Counting() as counting:
        assert core.step() == batch
    assert len(core.scheduler.running) == batch, "the step failed"
    return counting.counted


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """A llama of four layers, whose trained length is 64."""
    return tiny_checkpoint("llama")


@pytest.fixture
def runner(checkpoint: Checkpoint) -> ModelRunner:
    """Over a cache of its own."""
    return build_runner(checkpoint, CONFIG)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_decode_step_is_one_forward_and_a_bounded_number_of_operators(
    checkpoint: Checkpoint, runner: ModelRunner, batch: int
) -> None:
    """catches a forward per sequence, and operators per sequence: bounds are the same for both"""
    core = decoding(checkpoint, runner, batch, 20)
    forwards: list[int] = []
    hook = checkpoint.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    counted = counted_step(core, batch)
    hook.remove()
    assert len(forwards) == 1
    assert counted.calls.total() <= 700, counted.calls
    assert counted.num_allocations <= 210, counted.calls
    assert counted.num_copies <= 50, counted.calls


def test_what_the_cache_does_is_not_done_before(
    checkpoint: Checkpoint, runner: ModelRunner
) -> None:
    """catches transformers' search for packed sequences, and rotations by nothing"""
    counted = counted_step(decoding(checkpoint, runner, 8, 20), 8)
    assert not {"diff", "cumsum", "neg", "cat"} & set(counted.calls), counted.calls


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}, {"logprobs": 2}], ids=str)
def test_a_long_context_costs_no_operator_and_no_byte_more(
    checkpoint: Checkpoint, sampling: dict[str, Any]
) -> None:
    """catches a gathered context, a mask as long as it, a cache that is copied or grows"""
    found = []
    for num_prompt in (40, 700):
        core = decoding(checkpoint, build_runner(checkpoint, CONFIG), 2, num_prompt, **sampling)
        found.append(counted_step(core, 2))
    assert found[0] == found[1]


def test_the_cache_stays_where_it_is(checkpoint: Checkpoint, runner: ModelRunner) -> None:
    """catches pages that are written by making others: the same storages, and no step their size"""
    store = runner._store

    def places() -> list[int]:
        return [storage(each) for layer in range(LAYERS) for each in store.pages(layer)]

    before = places()
    assert len(set(before)) == 2 * LAYERS
    core = decoding(checkpoint, runner, 8, 60)
    least = min(each.untyped_storage().nbytes() for each in store.pages(0))
    for _ in range(5):
        assert counted_step(core, 8).num_bytes < least
    assert places() == before
    page = core.scheduler.running[0].pages[0]
    assert all(store.pages(layer)[0][page].any() for layer in range(LAYERS)), "nothing was written"


def test_penalties_count_what_is_new(checkpoint: Checkpoint, runner: ModelRunner) -> None:
    """catches the whole answer counted again, or a number per word of the vocabulary"""
    plain = counted_step(decoding(checkpoint, runner, 8, 20), 8)
    penalised = counted_step(decoding(checkpoint, runner, 8, 20, **PENALTIES), 8)
    rows = 8 * VOCAB_SIZE * 4  # one copy of the logits, in bytes
    assert penalised.num_bytes - plain.num_bytes < 4 * rows


class Calls:
    """Counts Python's own calls of its thread; those of the library under a forward excluded."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """A profiler's hook."""
        self.num += event == "call"

    def of(self, core: EngineCore, batch: int) -> int:
        """Those of one step."""
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
    checkpoint: Checkpoint, num_prompt: int
) -> None:
    """catches a loop over tokens, pages or pairs of sequences in the Python around the model"""
    calls = {}
    for batch in (1, 8):
        core = decoding(checkpoint, Silent(checkpoint, "x"), batch, num_prompt)
        calls[batch] = Calls().of(core, batch)
    assert calls[1] <= 125
    assert (calls[8] - calls[1]) / 7 <= 75


class Silent(Script):
    """A scripted model without its own calls."""

    def run(self, spans: Sequence[Any], clock: Any) -> torch.Tensor:
        """The same row for all."""
        return torch.zeros(sum(len(span.logit_rows) for span in spans), VOCAB_SIZE)
