"""Times the host's part of a step of 32 layers: `python -m tests.step_times`, without a GPU.

The model has the layers of a Llama, and rows so small that products take little. Kernels of our own
are neither compiled nor run, and products are torch's on a CPU. So both columns have the Python of
a step, and the times of a driver come on top. Time is that of the thread, because it is the
interpreter's that a GPU waits for. The third column is a replay of a captured step: its inputs are
filled, and no launch of the driver is counted.
"""

import sys
from time import thread_time
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.gpu.backend import TritonAttention
from ropewalk.model_runtime.gpu.launch import Kernel
from ropewalk.model_runtime.gpu.program import trace
from ropewalk.model_runtime.gpu.program.flat_forward import FlatForward
from ropewalk.model_runtime.gpu.rms_norm import GpuRmsNorm, Scale
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.prompt_graphs import LEAST_TOKENS
from ropewalk.rope import Profile, Unscaled
from tests.checkpoints.tiny_models import tiny_model
from tests.compilations import Uncompiled
from tests.gpu_targets import Device

NUM_LAYERS, PAGE, MAX_LEN, ROUNDS = 32, 16, 512, 30
STEPS = {"8 decodes": (8, 0), "a prompt": (0, 16), "8 decodes and a prompt": (8, 16)}


def spans_of(num_decodes: int, prompt_len: int, table_id: int) -> list[Span]:
    """Decodes at position 63, each on pages of its own, and a prompt behind them."""
    spans = [
        Span([5], 63, range(4 * at, 4 * at + 4), table_id, range(1)) for at in range(num_decodes)
    ]
    if prompt_len:
        first = 4 * num_decodes
        pages = range(first, first - (-prompt_len // PAGE))
        rows = range(prompt_len - 1, prompt_len)
        spans.append(Span([5] * prompt_len, 0, pages, table_id, rows))
    return spans


def milliseconds(runner: ModelRunner, spans: list[Span]) -> tuple[float, int]:
    """The least time of a step, and its launches of kernels of our own."""
    times = []
    for _ in range(ROUNDS):
        began = thread_time()
        runner.run(spans)
        times.append((thread_time() - began) * 1e3)
        num_launches = len(Uncompiled.launched)
        Uncompiled.launched.clear()
    return min(times), num_launches


@torch.inference_mode()
def main() -> None:
    """Print a line for each kind of step."""
    torch.set_flush_denormal(True)  # memory that no kernel wrote slows products down
    driver.set_active(Device(90))
    JITFunction._do_compile = lambda self, key, *_, **__: self.device_caches[0][0].setdefault(
        key, Uncompiled(0)
    )
    assert issubclass(Kernel, JITFunction)
    model: Any = tiny_model("llama", num_hidden_layers=NUM_LAYERS, max_position_embeddings=MAX_LEN)
    native = read_native_rope(model)
    plans = patch_model(model, native)
    # A trial cannot compare what is not computed.
    trace.equivalent_norm = lambda module, _: (
        GpuRmsNorm(module.weight, Scale(module.weight.detach(), 1e-6, plus_one=False))
        if type(module).__name__ == "LlamaRMSNorm"
        else None
    )
    flat = FlatForward(model, trace.traced(model, plans), plans)
    cpu = torch.device("cpu")
    store = KVCache(CacheLayout(plans, torch.float32, PAGE), MAX_LEN // PAGE, cpu, row_keys=True)
    tables = RopeTables(native, PAGE, MAX_LEN, cpu)
    table_id = tables.id_of(Profile(Unscaled()))
    runner = ModelRunner(model, plans, store, tables, PAGE, backend=TritonAttention)
    sys.stdout.write("| step | modules, ms | list, ms | replay, ms | launches of ours |\n")
    sys.stdout.write("|---|--:|--:|--:|--:|\n")
    rows = {}
    for name, sizes in STEPS.items():
        spans = spans_of(*sizes, table_id)
        before, num_before = milliseconds(runner, spans)
        model.forward = flat
        now, num_now = milliseconds(runner, spans)
        del model.forward
        rows[name] = f"{before:.1f} | {now:.1f}", f"{num_before}, {num_now}, 1"
    model.forward = flat
    limits = CaptureLimits(MAX_LEN, 16, 0, max_prompt_tokens=LEAST_TOKENS)
    runner.capture_graphs(limits, lambda work: (work(), lambda: None))
    assert runner._prompt_graphs is not None
    for each in runner._prompt_graphs._captured.values():
        each.is_proven = True  # nothing is computed that could be compared
    Uncompiled.launched.clear()
    for name, sizes in STEPS.items():
        replay, num_launches = milliseconds(runner, spans_of(*sizes, table_id))
        assert not num_launches
        times, launches = rows[name]
        sys.stdout.write(f"| {name} | {times} | {replay:.2f} | {launches} |\n")


if __name__ == "__main__":
    main()
