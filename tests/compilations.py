"""Counts the kernels that serving compiles: `python -m tests.compilations`, without a GPU.

Nothing is compiled. A kernel is counted when Triton finds no compiled one for the kinds of its
arguments. Every launch is compared with what Triton would launch.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner, first_of_each_kind, warm_up
from ropewalk.model_runtime.gpu.launch import Kernel, jit
from ropewalk.model_runtime.page_groups import group_layers
from ropewalk.model_runtime.runner import backends, model_runner
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import DualChunk, Linear, Profile, ReRope, SelfExtend, Shifted, Sinks, Unscaled
from tests.doubles.engines import tiny_checkpoint
from tests.gpu_targets import Device

# Windows and soft caps; sinks; interleaved pairs and layers without rotation.
ARCHITECTURES = ("llama", "gemma2", "gpt_oss", "cohere2")
NUM_STEPS = 200
PROFILES = [Profile(Linear(factor=1.0 + index)) for index in range(17)]
METHODS = (ReRope(96), SelfExtend(96, 16), DualChunk(256, 64), Shifted(128, 32), Sinks(4, 200))
PLACED = [
    Profile(Unscaled()),
    *(Profile(Unscaled(), logn_len, each) for each in METHODS for logn_len in (None, 128)),
]
CONFIG = EngineConfig(kv_cache_tokens=8192, max_model_len=2048, page_size=16)
CODED = replace(CONFIG, kv_cache_dtype="fixed8")


def random_steps(
    draw: random.Random,
    count: int,
    num_tables: int = len(PROFILES),
    num_groups: int = 1,
    page_size: int = 16,
) -> Iterator[list[Span]]:
    """Steps of decodes and chunks that differ in every number; sequences may share pages."""
    num_pages = CONFIG.kv_cache_tokens // page_size * num_groups
    for _ in range(count):
        spans = []
        for _ in range(draw.choice((1, 1, 2, 3, 5, 16, 21))):
            num_tokens = draw.choice((1, 1, 1, 2, 16, draw.randint(1, 70)))
            first = draw.choice((0, 15, 16, draw.randint(0, 1900)))
            pages = [
                draw.randrange(num_pages)
                for _ in range(((first + num_tokens) // page_size + 1) * num_groups)
            ]
            rows = draw.choice((range(num_tokens - 1, num_tokens), range(num_tokens), range(0)))
            span = Span([0] * num_tokens, first, pages, draw.randrange(num_tables), rows)
            spans.append(span._replace(tail_page=len(spans)))
        if not any(span.logit_rows for span in spans):
            spans[-1] = spans[-1]._replace(logit_rows=range(1))
        yield spans


@jit("free", "number")
def _odd(  # noqa: ANN202, PLR0917
    pointer, free, kind, number, real,  # noqa: ANN001
    FIRST: tl.constexpr, SECOND: tl.constexpr = 3,
):  # fmt: skip
    """A kernel with an argument of each kind."""


def odd_launches(draw: random.Random) -> None:
    """Launch with addresses, integers, types and constants of all kinds."""
    for _ in range(3000):
        dtypes = draw.choices((torch.bfloat16, torch.float32, torch.int64), k=2)
        first, second = (torch.zeros(64, dtype=dtype)[draw.choice((0, 0, 1)) :] for dtype in dtypes)
        kind, number = draw.choices((0, 1, 15, 16, 48, 2**31 - 1, 2**31, 2**40), k=2)
        named = draw.choice(({}, {"SECOND": 3}, {"SECOND": 4}, {"num_warps": 8}))
        grid = draw.choice(((3,), (2, 5), (1, 2, 3)))
        _odd[grid](first, second, kind, number, 0.5, draw.choice((7, 8)), **named)


class Uncompiled(CompiledKernel):  # type: ignore[misc]  # triton has no types
    """Replaces a compiled kernel; a launch of it is kept."""

    packed_metadata = "metadata"
    launched: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, number: int) -> None:
        self.function = number

    def launch_metadata(self, *_: Any) -> None:
        """Nothing, without hooks."""

    @property
    def run(self) -> Any:
        """Keep the arguments of a launch."""
        return lambda *args: self.launched.append(args)


def _number(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


class Compared:
    """Launches each kernel as it is served, and compares it with what Triton launches."""

    def __init__(self) -> None:
        self.num_launches = self.num_direct = 0
        self._served = Kernel.__getitem__
        Kernel.__getitem__ = lambda kernel, grid: partial(self._launch, kernel, grid)

    def _launch(self, kernel: Kernel, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        Uncompiled.launched.clear()
        self._served(kernel, grid)(*args, **named)
        (found,) = Uncompiled.launched
        self.num_launches += 1
        self.num_direct += isinstance(found[9], int)  # and no tensor
        kernel.run(*args, grid=grid, warmup=False, **named)
        expected = Uncompiled.launched[-1]
        assert found[:6] == expected[:6], (kernel, found[:6], expected[:6])
        assert [*map(_number, found[9:])] == [*map(_number, expected[9:])], kernel


def main() -> None:
    """Print one line for each architecture: kernels compiled by the warm-up, and afterwards.

    The last lines are of a Llama with position methods, over codes of eight bits, and with
    exact_batches. `direct`: launches of serving without Triton's Python.
    """
    from ropewalk.model_runtime.gpu.backend import TritonAttention

    compiled: Counter[str] = Counter()
    kernels: set[Kernel] = set()

    def counted(self: Any, key: str, *_: Any, **__: Any) -> object:
        compiled[self.__name__] += 1
        kernels.add(self)
        return self.device_caches[0][0].setdefault(key, Uncompiled(sum(compiled.values())))

    driver.set_active(Device())
    JITFunction._do_compile = counted
    compared = Compared()
    odd_launches(random.Random(0))
    assert compared.num_launches > compared.num_direct > 100
    checkpoints = {name: tiny_checkpoint(name) for name in ARCHITECTURES}
    for module in (backends, model_runner):
        module.backend_for = lambda _: TritonAttention  # type: ignore[attr-defined]
    backends.has_cpu_kernels = lambda _: False  # for codes
    cases = [(name, checkpoint, PROFILES, CONFIG) for name, checkpoint in checkpoints.items()]
    llama = checkpoints["llama"]
    cases += [
        ("methods", llama, PLACED, CONFIG), ("codes", llama, PROFILES, CODED),
        ("exact", replace(llama, exact_batches=True), PROFILES, CONFIG),
    ]  # fmt: skip
    for name, checkpoint, profiles, limits in cases:
        groups, _ = group_layers(checkpoint.windows, checkpoint.plans, CONFIG.max_model_len)
        config = replace(limits, page_groups=groups)
        runner: ModelRunner = build_runner(checkpoint, config, profiles)
        compiled.clear()
        for kernel in kernels:
            kernel.device_caches[0][0].clear()
            kernel._compiled.clear()
        if "--cold" not in sys.argv:
            for profile in first_of_each_kind(profiles):
                warm_up(runner, profile, 0, config)
        line: dict[str, Any] = {"architecture": name, "warm_up": dict(compiled)}
        compiled.clear()
        compared.num_launches = compared.num_direct = 0
        numbers = NUM_STEPS, len(profiles), config.num_groups, config.page_size
        for spans in random_steps(random.Random(name), *numbers):
            runner.run(spans)
        line |= {"serving": dict(compiled), "launches": compared.num_launches}
        sys.stdout.write(json.dumps(line | {"direct": compared.num_direct}) + "\n")


if __name__ == "__main__":
    main()
