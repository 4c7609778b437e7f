"""Compiles the GPU's kernels for one kind of card, without a card, and prints their usage.

`python -m tests.gpu_targets 86` compiles all of them for compute capability 8.6. A process has one
target, because a kernel keeps the first one that it is compiled for.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ropewalk.model_runtime.attention.paged_attention import LayerRead
from ropewalk.model_runtime.gpu.cards.card import Card
from ropewalk.model_runtime.gpu.launch import Kernel
from ropewalk.rope import DualChunk, ReRope
from tests.oracles.attention_cases import Case, Laid
from tests.oracles.eight_bit_reads import in_codes

# By compute capability, times ten. Shared memory is from the CUDA C++ guide, the rest from data
# sheets.
CARDS = {
    80: Card(108, 164 * 1024),  # A100
    86: Card(82, 100 * 1024),  # RTX 3090
    89: Card(128, 100 * 1024),  # RTX 4090
    90: Card(132, 228 * 1024),  # H200
    120: Card(170, 100 * 1024),  # RTX 5090
}
LLAMA = {"heads": (32, 8), "dims": (128, 128)}
SPANS = ((3001, 1), (70, 33))
CASES = {
    "llama": Case(**LLAMA, spans=SPANS, dtype=torch.bfloat16),
    "alone": Case(**LLAMA, spans=((40, 1),), dtype=torch.bfloat16),
    "as served": Case(**LLAMA, spans=SPANS, dtype=torch.bfloat16, page_size=64),
    "all": Case(
        heads=(6, 2), dims=(80, 64), spans=SPANS, dtype=torch.float16, rotary_share=0.5,
        window=40, softcap=30.0, has_sinks=True, page_size=20,
    ),
    "sinks": Case(**LLAMA, spans=SPANS, dtype=torch.bfloat16, window=40, has_sinks=True),
    "float32": Case(spans=SPANS, rotary_share=None),
    "wide": Case(
        heads=(8, 4), dims=(256, 256), spans=SPANS, dtype=torch.bfloat16, window=1024, softcap=30.0,
    ),
    "chunks": Case(
        **LLAMA, spans=SPANS, dtype=torch.bfloat16, page_size=64, positions=DualChunk(1088, 64),
    ),
    "rerope": Case(**LLAMA, spans=SPANS, dtype=torch.bfloat16, page_size=64, positions=ReRope(40)),
    "rerope, all": Case(
        heads=(6, 2), dims=(80, 64), spans=SPANS, dtype=torch.float16, rotary_share=0.5,
        window=60, softcap=30.0, has_sinks=True, page_size=20, positions=ReRope(40),
    ),
    "wide float32": Case(heads=(8, 4), dims=(256, 256), spans=SPANS),
}  # fmt: skip
FEW = ("as served", "wide")
CODED = ("as served", "all", "wide", "rerope", "float32")
EXACT = ("as served", "all", "sinks", "float32", "wide")


@dataclass(frozen=True, slots=True)
class Device:
    """Replaces the GPU's driver for triton; nothing is launched."""

    capability: int = 90

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The only stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The target of the compilation."""
        return GPUTarget("cuda", self.capability, 32)


@cache
def usage(kernel: Any) -> dict[str, int]:
    """Registers and bytes of stack of a thread, by NVIDIA's own tool, which triton carries.

    And the warps and the bytes of shared memory of a program.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [tool, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    registers, stack_bytes = map(int, found.groups())
    return {
        "registers": registers,
        "stack_bytes": stack_bytes,
        "warps": kernel.metadata.num_warps,
        "shared_bytes": kernel.metadata.shared,
    }


def ptx_of(kernel: Any) -> str:
    """The code of a kernel before the last compilation."""
    text: str = kernel.asm["ptx"]
    return text


def _only_compiled(case: str, read: LayerRead | None = None) -> Any:
    """The replacement of a launch. `read`: what `_decode` reads."""
    from ropewalk.model_runtime.gpu.cards.tuning import shared_bytes, sizes_of, tuning_of

    def compiled(function: Any, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            kernel = function.warmup(*args, grid=grid, **options)
            line = {"case": case, "kernel": function.__name__, **usage(kernel)}
            if function.__name__ == "_add":  # all warps read what one of them writes
                code = ptx_of(kernel)
                line["waits"] = -1 < code.find("bar.sync") < code.find("st.global")
            if read is not None and function.__name__ == "_decode":
                line["programs"] = tuning_of(read).programs_per_processor
                line["foreseen_bytes"] = shared_bytes(sizes_of(read), options["num_stages"])
            sys.stdout.write(json.dumps(line) + "\n")

        return launch

    return compiled


def _uncomputed(query_THD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of torch's flash attention without its numbers; torch is compiled already."""
    num_tokens, num_heads, _ = query_THD.shape
    return torch.empty_like(query_THD), torch.empty(num_heads, num_tokens)


def _compile_layers() -> None:
    """Norms and gates in the shapes of Llama 3 8B, Gemma 2 and the tests."""
    from ropewalk.model_runtime.gpu.gate import Activation, gate_into
    from ropewalk.model_runtime.gpu.rms_norm import Scale, normalize, normalize_into

    for name, dtype, width, half, plus_one in (
        ("llama layer", torch.bfloat16, 4096, 14_336, False),
        ("gemma layer", torch.bfloat16, 3584, 14_336, True),
        ("wide layer", torch.float16, 16_384, 53_248, False),
        ("float32 layer", torch.float32, 100, 300, False),
    ):
        Kernel.__getitem__ = _only_compiled(name)
        x = torch.randn(3, width, dtype=dtype)
        scale = Scale(x[0], 1e-5, plus_one)
        inner = scale if plus_one else None
        normalize_into(x, scale, x, residual_RC=x, summed_RC=x, inner=inner)
        normalize(torch.randn(1, 3, 5, width, dtype=dtype)[:, :, 1:4], scale)
        activation = Activation.GELU_TANH if plus_one else Activation.SILU
        joined = torch.randn(3, 2 * half, dtype=dtype)
        gate_into(joined, joined.new_empty(3, half), activation)


def _compile_states() -> None:
    """A hybrid's two kinds of layers: Qwen 3.5 0.8B's shape in bfloat16, and sizes of no power."""
    from ropewalk.model_runtime.attention.state_store import DeviceParts
    from ropewalk.model_runtime.gpu.states.convolution import convolve
    from ropewalk.model_runtime.gpu.states.delta_rule import delta_rule, norm_and_gate

    places = torch.arange(4)
    parts = DeviceParts(places[:3], places[1:], places[:3], places[:3], places, 1)
    for name, dtype, (num_key_heads, num_heads, key_dim, dim) in (
        ("states", torch.bfloat16, (16, 16, 128, 128)),
        ("states, float32", torch.float32, (2, 6, 80, 48)),
    ):
        Kernel.__getitem__ = _only_compiled(name)
        num_channels = 2 * num_key_heads * key_dim + num_heads * dim
        x_TC, mixed_TC = torch.zeros(3, num_channels, dtype=dtype), torch.zeros(3, num_channels)
        taps_WC, tail_NLC = torch.zeros(4, num_channels), torch.zeros(3, 3, num_channels)
        convolve(x_TC, taps_WC, tail_NLC, parts, mixed_TC)
        convolve(x_TC, taps_WC, tail_NLC, parts, x_TC, (taps_WC[0], x_TC))
        state_NHKD, out_TV = (
            torch.zeros(3, num_heads, key_dim, dim),
            torch.zeros(3, num_heads * dim),
        )
        beta_TH, rate_H = torch.zeros(3, num_heads, dtype=dtype), torch.zeros(num_heads)
        delta_rule(
            mixed_TC, beta_TH, beta_TH, (rate_H, rate_H), state_NHKD, parts, num_key_heads, out_TV
        )
        norm_and_gate(out_TV, out_TV.to(dtype), torch.ones(dim), 1e-6, out_TV.to(dtype))


def _compile_draws() -> None:
    """Draws from a small vocabulary, and from that of Llama 3."""
    from ropewalk.model_runtime.gpu.sampling.draw_ranked import CUTS, draw_rows

    for size in (300, 128_256):
        Kernel.__getitem__ = _only_compiled(f"{size} logits")
        logits_RV = torch.zeros(2, size)
        cuts_RC = torch.zeros(2, CUTS, dtype=torch.float64)
        draw_rows(logits_RV, cuts_RC, logits_RV, (True, True, True))


def _compile_codes(cases: Iterable[str]) -> None:
    """Writes and reads of pages with codes of eight bits."""
    from ropewalk.model_runtime.gpu.backend import TritonAttention

    for name in cases:
        laid, read = in_codes(CASES[name])
        case = laid.case
        Kernel.__getitem__ = _only_compiled(f"{name}, codes", read)
        shape = (len(read.query_THD), case.heads[1], case.dims[0])
        key_TKD = torch.randn(shape, dtype=case.dtype)
        value_TKV = torch.randn(*shape[:2], case.dims[1], dtype=case.dtype)
        attention = TritonAttention(laid.batch)
        attention.write(read.keys_NKDO, read.values_NKOV, key_TKD, value_TKV, read.scales)
        attention.read(read)


def _compile_exact() -> None:
    """Reads and products with one order of sums."""
    from ropewalk.model_runtime.gpu.exact import attention
    from ropewalk.model_runtime.gpu.exact.product import expert_products, product_of, row_tiles

    attention._STORED_BYTES = 1 << 30  # pieces are stored, and merged
    for name in EXACT:
        laid = Laid(CASES[name], torch.device("cpu"))
        Kernel.__getitem__ = _only_compiled(f"exact, {name}")
        attention.ExactAttention(laid.batch).read(laid.read)
    for dtype, num_outputs, num_inputs in (
        (torch.bfloat16, 6144, 4096), (torch.float16, 300, 1000), (torch.float32, 100, 1024),
    ):  # fmt: skip
        Kernel.__getitem__ = _only_compiled(f"exact, {dtype}")
        weight_NK = torch.zeros(num_outputs, num_inputs, dtype=dtype)
        for num_rows in (1, 64, 65, 513):
            product_of(weight_NK.new_zeros(num_rows, num_inputs), weight_NK, weight_NK[:, 0])
        for num_rows in (16, 17):
            tiles = row_tiles(torch.zeros(num_rows, dtype=torch.int64), 1)
            x_RK = weight_NK.new_zeros(num_rows, num_inputs)
            expert_products(x_RK, (weight_NK[None],), None, tiles)


def _compile_reads(cases: Iterable[str]) -> None:
    """Writes and reads of pages with exact numbers."""
    from ropewalk.model_runtime.gpu.backend import TritonAttention

    for name in cases:
        case = CASES[name]
        laid = Laid(case, torch.device("cpu"))
        Kernel.__getitem__ = _only_compiled(name, laid.read)
        num_tokens = len(laid.read.query_THD)
        shape = (num_tokens, case.heads[1], case.dims[0])
        key_TKD = torch.randn(shape, dtype=case.dtype)
        value_TKV = torch.randn(*shape[:2], case.dims[1], dtype=case.dtype)
        attention = TritonAttention(laid.batch)
        attention.write(laid.read.keys_NKDO, laid.read.values_NKOV, key_TKD, value_TKV)
        attention.read(laid.read)


def main() -> None:
    """Every launch of a write and a read is compiled with the arguments it has, and not run.

    Arguments: the capability, times ten, and `few` for a part of the kernels, which takes half
    a minute, or `exact` for those of exact_batches only.
    """
    from ropewalk.model_runtime.gpu import decode
    from ropewalk.model_runtime.gpu import flash as triton_flash
    from ropewalk.model_runtime.gpu.cards import tuning
    from ropewalk.model_runtime.gpu.exact import attention
    from ropewalk.model_runtime.gpu.sampling import draw_ranked

    capability = int(sys.argv[1])
    driver.set_active(Device(capability))
    triton_flash.is_available = lambda _: True
    triton_flash.flash = _uncomputed
    for module in (attention, decode, tuning, draw_ranked):
        module.card_of = lambda _: CARDS[capability]
    if sys.argv[2:] == ["few"]:
        _compile_reads(FEW)
        _compile_codes(("as served",))
        _compile_draws()
        return
    if sys.argv[2:] == ["exact"]:
        _compile_exact()
        return
    _compile_reads(CASES)
    _compile_codes(CODED)
    _compile_layers()
    _compile_states()
    _compile_draws()


if __name__ == "__main__":
    main()
