"""Flash attention 4 is called as torch's is, and serves only if a trial finds it right and faster.

Without a GPU the oracle stands for both. `test_its_kernels_compile` needs the extra `hopper`.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from ropewalk.model_runtime.attention.prompt_groups import Mask
from ropewalk.model_runtime.gpu import flash
from ropewalk.model_runtime.gpu.cards import flash_4
from tests.oracles.exact_flash import exact_flash

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
MASKS = {
    Mask(-1, 0): (None, 0),
    Mask(-1, -1): (None, None),
    Mask(127, 0): (127, 0),
}


@pytest.mark.parametrize("mask", MASKS)
def test_the_package_is_called_by_its_own_names(
    mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of the mask go to its window, where None is all keys."""
    calls: list[dict[str, Any]] = []

    def packages(*rows: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
        calls.append(named)
        return rows[0], rows[1]

    monkeypatch.setattr(flash_4, "_function", lambda: packages)
    rows, offsets = [torch.zeros(3)] * 3, (torch.tensor([0, 3]), torch.tensor([0, 4]))
    flash_4.flash_4(*rows, *offsets, 3, 4, 0.5, mask)
    (named,) = calls
    assert named["window_size"] == MASKS[mask]
    assert (named["cu_seqlens_q"] is offsets[0], named["cu_seqlens_k"] is offsets[1]) == (True,) * 2
    assert (named["max_seqlen_q"], named["max_seqlen_k"], named["softmax_scale"]) == (3, 4, 0.5)
    assert named["return_lse"]


def beside(own_ms: float) -> Any:
    """Times of both, of which the other has 1 ms."""
    return lambda *_: (own_ms, 1.0)


def without_lse(*given: Any) -> tuple[Tensor, Tensor]:
    """The right answer with the log-sum-exp in another base."""
    out_THD, lse_HT = exact_flash(*given)
    return out_THD, lse_HT * 1.4427


def uncausal(*given: Any) -> tuple[Tensor, Tensor]:
    """The answer with all keys, whatever the mask is."""
    return exact_flash(*given[:-1], Mask(-1, -1))


def broken(*_: Any) -> tuple[Tensor, Tensor]:
    """What a compiler without its driver does."""
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("own", "own_ms", "serves"),
    [
        (exact_flash, 0.5, True),
        (exact_flash, 1.5, False),
        (without_lse, 0.5, False),
        (uncausal, 0.5, False),
        (broken, 0.5, False),
    ],
)
def test_a_trial_decides(
    own: Any,
    own_ms: float,
    serves: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong answer, an error and a slower one leave flash attention 2."""
    monkeypatch.setattr(flash_4, "_times", beside(own_ms))
    assert flash_4.is_better(CPU, own, exact_flash) == serves


@pytest.mark.parametrize("num_tokens", [flash_4.LEAST_TOKENS - 1, flash_4.LEAST_TOKENS])
def test_it_reads_long_prompts_only(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python takes longer than the GPU does for short ones."""
    chosen: list[str] = []
    monkeypatch.setattr(flash, "serves_long_prompts", lambda _: True)
    for name in ("flash", "flash_4"):
        monkeypatch.setattr(flash, name, lambda *_, name=name: chosen.append(name))
    query_THD = torch.zeros(num_tokens, 1, 8)
    anything: Any = MagicMock(is_padded=False)  # a read and a group, which are passed on
    flash.flash_part(anything, anything, query_THD, query_THD, query_THD)
    assert chosen == ["flash_4" if num_tokens >= flash_4.LEAST_TOKENS else "flash"]


def test_a_cpu_has_none() -> None:
    """Nothing is imported for it."""
    assert not flash_4.is_installed(CPU)


COMPILE = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from ropewalk.model_runtime.attention.prompt_groups import Mask
from ropewalk.model_runtime.gpu.cards.flash_4 import flash_4

for dim, mask in ((128, Mask(-1, 0)), (64, Mask(127, 0)), (256, Mask(-1, -1))):
    with FakeTensorMode():
        query = torch.empty(64, 8, dim, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(500, 2, dim, dtype=torch.bfloat16, device="cuda")
        offsets = torch.empty(3, dtype=torch.int32, device="cuda")
        out, lse = flash_4(query, key, key, offsets, offsets, 33, 300, 0.1, mask)
        print(tuple(out.shape), tuple(lse.shape), lse.dtype)
"""


@pytest.mark.long
def test_its_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """The package compiles for a card that is not there; shapes are those of torch's function."""
    if find_spec("flash_attn") is None:
        pytest.skip("the extra hopper is not installed")
    target = {
        "FLASH_ATTENTION_ARCH": "sm_90",
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_NUM_SMS": "132",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path / "kernels"),
        "TMPDIR": str(tmp_path),
    }
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, **target, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines() == [
        f"(64, 8, {dim}) (8, 64) torch.float32" for dim in (128, 64, 256)
    ]
