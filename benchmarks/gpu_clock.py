"""Timing of work on a device, and the device's own rates."""

import statistics
import time
from collections.abc import Callable, Sequence

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
    """Return the bytes read and written per second by a copy of `num_bytes`."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(device, [lambda: target.copy_(source)], repeats)


def matrix_rate(device: torch.device, size: int, repeats: int) -> float:
    """Return the operations per second of a square bfloat16 product of random numbers."""
    a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(device, [lambda: torch.mm(a, b, out=out)], repeats)
