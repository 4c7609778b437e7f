"""The GPU's layers with states against the formula in float64, transformers, and their own parts.

On a GPU where there is one, else by Triton's interpreter.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")
pytest.importorskip("numba", reason="the formula's cases are those of a CPU's kernels")

from ropewalk.model_runtime.attention.paged_attention import StateCall
from ropewalk.model_runtime.attention.state_store import DeviceParts
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_engine, draft_tokens
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.gpu.states.calls import DeviceStates, GpuStates, _DeltaWeights
from ropewalk.model_runtime.layers.states.state_kernels import DeltaProducts
from ropewalk.model_runtime.loading import checkpoint as loading
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.runner import backends
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.rope import Profile, Unscaled
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import answer, checkpoint_of, deployment_of, request
from tests.doubles.recorded_runners import Again, Conversations, capture, runner_of
from tests.model_runtime.cpu_kernels.test_states import NUM_TAPS, Case, case, exact
from tests.oracles.triton_attention import check_few_decodes, use_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = DEVICE.type == "cpu"
NATIVE = Profile(Unscaled())
Parts = list[tuple[int, int, int, int]]


def tokens_of(kind: str, order: Any = range(8), num_key_heads: int = 1) -> Case:
    """A case of some of its tokens, because the interpreter is slow."""
    whole = case(kind, num_key_heads=num_key_heads)
    names = ("x_TY", "gate_TY", "beta_TH", "step_TH")
    taken = {name: getattr(whole.inputs, name)[np.asarray(order)] for name in names}
    sizes = whole.num_key_heads, whole.key_dim, whole.dim
    return Case(whole.inputs._replace(**taken), whole.weights, *sizes)


def call_of(given: Case, dtype: torch.dtype = torch.float32) -> StateCall:
    """The call of a layer for a case's tokens."""
    inputs, weights = given.inputs, given.weights
    numbers = [inputs.x_TY, inputs.gate_TY, inputs.beta_TH, inputs.step_TH]
    tensors = DeltaProducts(*(torch.from_numpy(each).to(DEVICE, dtype) for each in numbers))
    of_layer = [weights.taps_WC, weights.rate_H, weights.step_bias_H, weights.norm_D]
    made = [torch.from_numpy(each.astype(np.float32)).to(DEVICE) for each in of_layer]
    return GpuStates().delta(tensors, _DeltaWeights(*made, float(weights.eps)), given.num_key_heads)


def slots(given: Case, count: int) -> DeviceStates:
    """Slots full of NaN, so that a number that was not written shows."""
    sizes = given.num_heads, given.key_dim, given.dim
    shape = StateShape(NUM_TAPS - 1, given.inputs.x_TY.shape[1], *sizes)
    store = DeviceStates({0: shape}, count, DEVICE)
    for each in store.layer(0):
        each.fill_(torch.nan)
    return store


def parts_of(sequences: list[Parts]) -> DeviceParts:
    """The parts of some sequences that lie behind each other in the row."""
    rows = [part for parts in sequences for part in parts]
    columns = [torch.tensor(each, device=DEVICE) for each in zip(*rows, strict=True)]
    first = np.cumsum([0, *map(len, sequences)])
    most = max(parts[-1][1] - parts[0][0] for parts in sequences)
    return DeviceParts(*columns, torch.from_numpy(first).to(DEVICE), most)


def run(call: StateCall, sequences: list[Parts], store: DeviceStates) -> Tensor:
    """The output of all tokens, [T, V]."""
    return call.advance(store.layer(0), parts_of(sequences))[0].cpu()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of sigmoids in the interpreter
@pytest.mark.parametrize("kind", ["random", "saturated", "zeros", "large"])
def test_the_delta_rule_is_the_formula_within_rounding(kind: str) -> None:
    """With decays of 0 and 1, keys and gates of zero, and states of large norm, too."""
    given = tokens_of(kind, num_key_heads=2 if kind == "random" else 1)
    got = run(call_of(given), [[(0, 8, -1, 0)]], slots(given, 1))
    expected = torch.from_numpy(exact(given))
    assert torch.allclose(got.double(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_convolution_is_its_formula(dtype: torch.dtype) -> None:
    """A long prompt, which is divided, between a decode behind a slot and a short prompt."""
    num_channels, lens = 40, (1, 300, 17)
    torch.manual_seed(0)
    joined = torch.randn(sum(lens), 3 * num_channels).to(DEVICE, dtype)
    taps, bias = torch.randn(3, num_channels).to(DEVICE), torch.randn(num_channels).to(DEVICE)
    store = DeviceStates({0: StateShape(2, num_channels)}, 3, DEVICE)
    tail = store.layer(0).tail_NLC
    before = tail[0].normal_().clone()
    ends = [0, *accumulate(lens)]
    sequences: list[Parts] = [
        [(begin, end, -1 if slot else 0, slot)] for slot, (begin, end) in enumerate(pairwise(ends))
    ]
    got = run(GpuStates().shift(joined, (taps, bias)), sequences, store)
    first, second, value = joined.chunk(3, dim=-1)
    inputs = (first * value).double()
    for slot, (begin, end) in enumerate(pairwise(ends)):
        kept = torch.zeros_like(before) if slot else before
        row = torch.cat([kept.double(), inputs[begin:end]])
        sums = sum(taps[tap].double() * row[tap : tap + end - begin] for tap in range(3))
        expected = second[begin:end].double() * (sums + bias.double())
        bound = 1e-5 if dtype == torch.float32 else 2**-6
        assert torch.allclose(got[begin:end].double(), expected.cpu(), rtol=bound, atol=bound)
        assert torch.equal(tail[slot].double(), row[-2:])


def test_parts_and_other_sequences_change_no_bit() -> None:
    """Chunks of one sequence between others, some of two parts, over slots in turn."""
    given, rng = tokens_of("random"), random.Random(0)
    whole = run(call_of(given), [[(0, 8, -1, 0)]], slots(given, 1))
    cuts = [0, 1, 2, 5, 6, 8]
    store, read = slots(given, 4), -1
    for begin, end in pairwise(cuts):
        stop, write = 2 + end - begin, rng.choice([0, 1])
        between: Parts = [(2, stop, read, write)]
        if stop > 3:  # the slot that is read may be written first, and then stays
            kept = 2 if read < 0 else read
            between, write = [(2, 3, read, kept), (3, stop, kept, 3)], 3
        around = tokens_of("random", [5, 6, *range(begin, end), 7])
        sequences = [[(0, 2, -1, -1)], between, [(stop, stop + 1, -1, -1)]]
        got = run(call_of(around), sequences, store)
        assert torch.equal(got[2:stop], whole[begin:end])
        read = write


def test_a_kept_slot_has_the_states_of_its_part() -> None:
    """A step that begins there has the bits of one that computes all."""
    given = tokens_of("random")
    store = slots(given, 3)
    whole = run(call_of(given), [[(0, 5, -1, 0), (5, 8, 0, 1)]], store)
    rest = run(call_of(tokens_of("random", range(5, 8))), [[(0, 3, 0, 2)]], store)
    assert torch.equal(rest, whole[5:])
    tail, state = (each.cpu() for each in store.layer(0))
    assert torch.equal(tail[1], tail[2])
    assert torch.equal(state[1], state[2])


# A layer with states and one of attention each. A GPU serves larger ones.
SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**SIZES, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {**SIZES, "full_attn_idxs": [1]},
}
if not IS_INTERPRETED:
    HYBRIDS = {"qwen3_5_text": {}, "qwen3_next": {}, "lfm2": {}}


class Hybrid(NamedTuple):
    """A tiny hybrid as a GPU holds it, and its answers on a CPU."""

    checkpoint: Checkpoint
    answers: list[list[int]]


def answers_of(checkpoint: Checkpoint) -> list[list[int]]:
    """Prompts of several lengths together, in chunks, and then a turn that finds a snapshot."""
    deployment = deployment_of(checkpoint)
    prompts = [[(7 * at + length) % 150 for at in range(length)] for length in (3, 9, 21)]
    asked = [request(deployment, ids, max_tokens=4, ignore_eos=True) for ids in prompts]
    config = EngineConfig(
        kv_cache_tokens=512, max_model_len=128, page_size=16, max_num_batched_tokens=20,
        enforce_eager=IS_INTERPRETED,
    )  # fmt: skip
    engine = build_engine(checkpoint, config)
    engine.start()
    found = answer(engine, *asked)
    again = [*prompts[2], *found[2].token_ids, 1, 2]
    found += answer(engine, request(deployment, again, max_tokens=3, ignore_eos=True))
    engine.stop()
    return [list(each.token_ids) for each in found]


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> Iterator[Hybrid]:
    """Without a GPU, everything until the end of the fixture is served by its kernels."""
    sizes = HYBRIDS[request.param]
    expected = answers_of(checkpoint_of(tiny_model(request.param, **sizes)))
    with pytest.MonkeyPatch.context() as patch:
        if IS_INTERPRETED:
            for module in (backends, loading):
                patch.setattr(module, "has_cpu_kernels", lambda _: False)
                patch.setattr(module, "has_gpu_kernels", lambda _: True)
            use_triton(patch)
            check_few_decodes(patch)
        yield Hybrid(checkpoint_of(tiny_model(request.param, **sizes).to(DEVICE)), expected)


def test_a_hybrid_is_checked_and_answers_as_on_a_cpu(hybrid: Hybrid) -> None:
    """The self-check compares it with transformers over several sequences and chunks."""
    checkpoint = hybrid.checkpoint
    assert checkpoint.states
    assert checkpoint.report.difference <= checkpoint.report.threshold
    assert answers_of(checkpoint) == hybrid.answers


@pytest.mark.skipif(not IS_INTERPRETED, reason="the recorder stands for a GPU's")
def test_recorded_steps_advance_the_states(hybrid: Hybrid) -> None:
    """The slots of a step are filled in before a replay, and padding writes to none."""
    recorder = Again()
    runners = [runner_of(hybrid.checkpoint, None, [NATIVE]) for _ in range(2)]
    capture(runners[0], recorder, max_rows=4)
    talks = Conversations(runners, [NATIVE] * 3)
    for tokens in (
        {0: 5, 1: 9, 2: 2},
        {0: 1, 1: 1, 2: 1},
        {0: 1, 2: 1},
        {1: 1},
        {0: 1, 1: 1, 2: 1},
    ):
        recorded, queued = talks.step(tokens)
        assert torch.allclose(recorded, queued, rtol=1e-4, atol=1e-4)
    assert recorder.num_replayed == 4


def test_drafts_on_a_gpu_are_refused_by_name() -> None:
    """A state that a wrong draft has advanced does not come back."""
    config = EngineConfig(kv_cache_tokens=512, max_model_len=128, max_draft_tokens=3)
    on_gpu: Any = SimpleNamespace(
        states={0: StateShape(2, 16)},
        device=torch.device("cuda"),
        report=SimpleNamespace(bitwise=False),  # as of every check on a GPU
    )
    with pytest.raises(ModelError, match=r"max_draft_tokens must be 0 .* states on a GPU, got 3"):
        draft_tokens(on_gpu, config)
    assert draft_tokens(on_gpu, replace(config, max_draft_tokens=None)) == 0
