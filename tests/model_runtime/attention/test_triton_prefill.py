"""The prefill of all prompts of a step against float64, by our kernel and by the library's call.

Without a GPU, an exact function with the same arguments stands for torch's flash attention.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles.attention_cases import RELATIVE_ERROR, Case, Laid, relative_error
from tests.oracles.exact_flash import exact_flash

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention import prompt_groups
from ropewalk.model_runtime.attention.prompt_groups import Mask
from ropewalk.model_runtime.gpu import flash as triton_flash
from ropewalk.model_runtime.gpu.backend import TritonAttention
from tests.doubles.launches import counted_launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Whole prompts, chunks behind a context, and single tokens between them.
SPANS = ((17, 17), (90, 1), (90, 33), (70, 7), (1, 1), (64, 2))
# The interpreter truncates bfloat16 numbers where a GPU rounds them.
MOST_ERROR = RELATIVE_ERROR | ({} if DEVICE.type == "cuda" else {torch.bfloat16: 1.5e-2})
HALF = {"dtype": torch.bfloat16}
CASES = {
    "window wider than some contexts": {"window": 80},
    "window of one": {"window": 1},
    "no rotation": {"rotary_share": None, "has_sinks": True},
    "page of 24": {"page_size": 24, "window": 50},
    "page of 4": {"page_size": 4},
    "one head for all": {"heads": (20, 1), "dims": (16, 16), "spans": ((17, 17), (40, 5))},
    "many wide heads": {"heads": (36, 12), "dims": (72, 72), "spans": ((90, 5), (40, 3))},
    "keys by dimension": {"row_keys": False},
    "f16": {"dtype": torch.float16, "has_sinks": True, "rotary_share": 0.5},
}
OWN_CASES = {
    "softcap, window, sinks": {"softcap": 5.0, "window": 37, "has_sinks": True, **HALF},
    "unequal dimensions": {"dims": (24, 40), "window": 30, **HALF},
    "odd dimension": {"dims": (20, 20), **HALF},
    "float32": {"window": 50, "has_sinks": True},
}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Torch's deterministic mode fills unwritten memory with NaN."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


class Calls:
    """The calls of the library's function."""

    def __init__(self) -> None:
        self.num_prompts: list[int] = []


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Let the library's function serve; without a GPU, the exact one in its place."""
    calls = Calls()
    flash = triton_flash.flash if DEVICE.type == "cuda" else exact_flash

    def noted(*arguments: object) -> object:
        cu_tokens_G1 = arguments[3]
        assert isinstance(cu_tokens_G1, torch.Tensor)
        calls.num_prompts.append(len(cu_tokens_G1) - 1)
        return flash(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_flash, "is_available", lambda _: True)
    monkeypatch.setattr(triton_flash, "flash", noted)
    return calls


def check(case: Case) -> None:
    """Check that the read of a case is as near to float64 as its dtype allows."""
    laid = Laid(case, DEVICE)
    got_THV = TritonAttention(laid.batch).read(laid.read)
    assert relative_error(got_THV, laid.expected()) < MOST_ERROR[case.dtype]


@pytest.mark.parametrize("name", CASES)
def test_the_library_reads_all_prompts_in_one_call(name: str, library: Calls) -> None:
    """Rotation, gathering, windows and sinks around the call give the answer in float64."""
    case = Case(**{"spans": SPANS, **HALF, **CASES[name]})  # type: ignore[arg-type]
    check(case)
    assert library.num_prompts == [sum(queries > 1 for _, queries in case.spans)]


@pytest.mark.parametrize("name", OWN_CASES)
def test_our_kernel_reads_layers_that_the_library_lacks(name: str, library: Calls) -> None:
    """Soft caps, unequal or odd dimensions and float32 stay away from the library's function."""
    check(Case(spans=SPANS, **OWN_CASES[name]))  # type: ignore[arg-type]
    assert not library.num_prompts


@pytest.mark.parametrize("name", ["page of 24", "one head for all", "f16"])
def test_our_kernel_reads_all_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cases on a device without flash attention."""
    monkeypatch.setattr(triton_flash, "is_available", lambda _: False)
    check(Case(**{"spans": SPANS, **HALF, **CASES[name]}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("most_keys", "softcap"), [(1, None), (150, 5.0), (175, None)])
def test_prompts_whose_keys_exceed_a_group_are_read_in_several(
    most_keys: int, softcap: float | None, library: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer does not change, and a group's keys stay below the limit or are one prompt's."""
    monkeypatch.setattr(prompt_groups, "MOST_KEYS", most_keys)
    check(Case(spans=SPANS, window=60, softcap=softcap, has_sinks=True, **HALF))  # type: ignore[arg-type]
    sizes = {1: [1, 1, 1, 1], 175: [3, 1]}  # of 17, 90, 66 and 61 keys
    if softcap is None:
        assert library.num_prompts == sizes[most_keys]


@pytest.mark.parametrize("seed", range(6 if DEVICE.type == "cuda" else 3))
def test_features_do_not_disturb_each_other(
    seed: int, library: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each seed draws a random combination of prompts, features and limits of a group."""
    draw = random.Random(seed)
    group, key_heads = draw.choice((1, 3, 4)), draw.choice((1, 2))
    spans = []
    for _ in range(draw.randint(2, 6)):
        queries = draw.choice((1, 2, 20, 40))
        spans.append((queries + draw.choice((0, draw.randint(0, 100))), queries))
    monkeypatch.setattr(prompt_groups, "MOST_KEYS", draw.choice((60, 150, 32_768)))
    dim = draw.choice((16, 24, 64))
    check(
        Case(
            spans=tuple(spans),
            heads=(group * key_heads, key_heads),
            dims=(dim, dim),
            rotary_share=draw.choice((None, 0.25, 0.5, 1.0)),
            page_size=draw.choice((4, 16, 20, 64)),
            dtype=draw.choice((torch.bfloat16, torch.float16)),
            window=draw.choice((None, 1, 9, 100)),
            has_sinks=draw.random() < 0.5,
            row_keys=draw.random() < 0.5,
        )
    )


@pytest.mark.parametrize(
    ("more", "launches"),
    [
        ({}, ["_gather", "_place", "_turn", "flash"]),
        ({"window": 20, "has_sinks": True}, ["_gather", "_place", "_turn", "flash"]),
        ({"softcap": 3.0}, ["_attend", "_gather", "_turn"]),
    ],
)
def test_a_layer_launches_as_much_for_five_prompts_as_for_one(
    more: dict[str, object], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's launches and torch's operations are counted; nothing else computes or copies."""
    flash: Callable[..., object] = triton_flash.flash if DEVICE.type == "cuda" else exact_flash
    monkeypatch.setattr(triton_flash, "is_available", lambda _: True)
    for num_prompts in (1, 5):
        spans = tuple((20 + number, 5) for number in range(num_prompts))
        laid = Laid(Case(spans=spans, **HALF, **more), DEVICE)  # type: ignore[arg-type]
        attention = TritonAttention(laid.batch)
        monkeypatch.setattr(triton_flash, "flash", flash)
        attention.read(laid.read)  # makes the lists of the step, as the first layer does
        with counted_launches() as counted:
            monkeypatch.setattr(triton_flash, "flash", counted.counting("flash", flash))
            attention.read(laid.read)
        assert sorted(counted.names.elements()) == launches


def test_layers_share_the_lists_of_a_step() -> None:
    """Layers with the same window have the same groups, and others have their own."""
    prompts = prompt_groups.Prompts(Laid(Case(spans=SPANS), DEVICE).batch)
    assert prompts.groups(None, 64) is prompts.groups(None, 64)
    assert prompts.queries is prompts.queries
    assert prompts.groups(16, 64)[0].num_keys < prompts.groups(None, 64)[0].num_keys


class Noted(TorchDispatchMode):
    """Keeps the arguments of the last operation, as its schema orders them."""

    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = MappingProxyType({})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation."""
        self.arguments, self.named = args, kwargs or {}
        return func(*args, **self.named)


@pytest.mark.parametrize("mask", [Mask(-1, 0), Mask(0, 0), Mask(4, 0), Mask(-1, -1), Mask(3, -1)])
def test_the_arguments_are_those_of_torchs_function(mask: Mask) -> None:
    """Torch's own description of the function gives the output's shapes for our arguments."""
    meta = torch.device("meta")
    query_THD = torch.empty(12, 6, 24, dtype=torch.bfloat16, device=meta)
    key_CKD = torch.empty(30, 2, 24, dtype=torch.bfloat16, device=meta)
    offsets_G1 = torch.zeros(3, dtype=torch.int32, device=meta)
    with Noted() as noted:
        out_THD, lse_HT = triton_flash.flash(
            query_THD, key_CKD, key_CKD, offsets_G1, offsets_G1, 8, 20, 0.2, mask
        )
    assert (out_THD.shape, out_THD.dtype) == (query_THD.shape, torch.bfloat16)
    assert (lse_HT.shape, lse_HT.dtype) == ((6, 12), torch.float32)
    dropout, is_causal = 0.0, mask.right == 0
    assert noted.arguments[5:9] == (8, 20, dropout, is_causal)
    sides = {"window_size_left": mask.left, "window_size_right": mask.right}
    assert noted.named == {"scale": 0.2, **sides}


def test_the_library_serves_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor has no flash attention; the limits are dtype, dimensions and the soft cap."""
    assert not triton_flash.is_available(torch.device("cpu"))
    monkeypatch.setattr(triton_flash, "is_available", lambda _: True)

    def serves(**more: object) -> bool:
        case = Case(**{"spans": ((3, 2),), **HALF, **more})  # type: ignore[arg-type]
        return triton_flash.serves(Laid(case, torch.device("cpu")).read)

    assert serves()
    assert serves(window=2, has_sinks=True, dims=(256, 256), heads=(1, 1))
    assert not serves(dims=(264, 264), heads=(1, 1))
    assert not serves(dims=(20, 20))
    assert not serves(dims=(24, 16))
    assert not serves(softcap=1.0)
    assert not serves(dtype=torch.float32)
