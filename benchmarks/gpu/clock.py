"""Timing of work on a device, and the device's own rates."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Work = Callable[[], object]


def seconds(device: torch.device, works: Sequence[Work], repeats: int) -> float:
    """Return the median time of one of `works` in seconds, over `repeats` runs of them in turn.

    If the works read different memory, none finds its input in a cache. On a GPU they are captured
    in a CUDA graph and replayed between two events, so Python's time is not measured.
    """
    if device.type != "cuda":
        return statistics.median(_on_host(works) for _ in range(repeats))
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for work in works:  # compiles, and allocates memory
            work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for work in works:
            work()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(works))
    return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _on_host(works: Sequence[Work]) -> float:
    begin = time.perf_counter()
    for work in works:
        work()
    return (time.perf_counter() - begin) / len(works)


def copy_rate(device: torch.device, num_bytes: int, repeats: int) -> float:
    """Return the bytes read and written per second by a copy of `num_bytes`.

    The bits are inverted, which makes it a kernel. A plain copy in a CUDA graph is one of the copy
    engine's, which had 2.74 TB/s on an H200 where this has 4.1.
    """
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device).view(torch.int64)
    work = partial(torch.bitwise_not, source, out=torch.empty_like(source))
    return 2 * num_bytes / seconds(device, [work], repeats)


def read_rate(device: torch.device, num_bytes: int, repeats: int) -> float:
    """Return the bytes read per second by a sum of `num_bytes`, which writes next to nothing."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    out = torch.empty((), dtype=torch.float32, device=device)
    work = partial(torch.sum, source, dim=0, out=out)
    return num_bytes / seconds(device, [work], repeats)


@dataclass(frozen=True, slots=True)
class MatrixRates:
    """Operations per second of a product: of a few, and of as many as fill seconds."""

    burst: float  # the median of single products
    sustained: float  # of all products of `sustained_s` together, as power and heat allow


def matrix_rates(
    device: torch.device, size: int, repeats: int, warm_s: float, sustained_s: float
) -> MatrixRates:
    """Return the rates of a square bfloat16 product of random numbers, after a warm-up.

    A processor that was idle raises its clock during the warm-up.
    """
    a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(a)
    work = partial(torch.mm, a, b, out=out)
    _repeat(device, work, warm_s)
    burst = seconds(device, [work], repeats)
    count, took = _repeat(device, work, sustained_s)
    return MatrixRates(2 * size**3 / burst, 2 * size**3 * count / took)


_AT_ONCE = 16  # products between two waits


def _repeat(device: torch.device, work: Work, least_s: float) -> tuple[int, float]:
    """Repeat the work for at least this time; return the number of times and the seconds."""
    count, begin = 0, _now(device)
    while True:
        for _ in range(_AT_ONCE):
            work()
        count += _AT_ONCE
        took = _now(device) - begin
        if took >= least_s:
            return count, took


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def first_seconds(device: torch.device, work: Work) -> float:
    """Return the time of one call with the host's part, which compiles if it is the first."""
    begin = _now(device)
    work()
    return _now(device) - begin


def kernel_names(device: torch.device, work: Work) -> list[str]:
    """Return the names of the kernels that a call launches, most time first; on a GPU only."""
    if device.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize(device)
    events = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    return [str(event.key)[:80] for event in events if event.device_time_total > 0][:4]
