"""`python -m benchmarks.server.host_steps`: the host's own time in a step that decodes.

The engine's step runs as it is served: scheduler, inputs of the step, sampler, detokenizer,
metrics, delivery. Only the model is absent. A stand-in for it returns logits that were made
before, and a stand-in for CUDA graphs replays nothing. The rest of a step is time in which a GPU
would wait.

Times are the processor time of the thread, because other work on the machine changes a clock's.
`--against` measures an older revision in the same run, with the two in turns.
"""

import gc
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import click
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.engine.engine_core import EngineCore
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.request import Output, Request, SamplingParams
from ropewalk.model_runtime.runner import step_timer
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.rope import native_rope
from ropewalk.server.metrics import MetricFactory, Metrics

_ROOT = Path(__file__).resolve().parents[2]
_PAGE = 64
_PROMPT = 1000  # tokens
_WARM_STEPS, _STEPS = 30, 100
_CONTEXT_BOUNDS = (4096, 32_768)


class _ReadyLogits(nn.Module):
    """A model that computes nothing: every row of its logits was made before."""

    def __init__(self, num_rows: int, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        generator = torch.Generator().manual_seed(7)
        self._logits_RV = torch.randn(num_rows, 256, generator=generator)
        # Every token is a whole character, as nearly all tokens of a large vocabulary.
        self._logits_RV[:, tokenizer.encode("abcdefghijklmnopqrstuvwxyz")] += 20

    def forward(self, *, logits_to_keep: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self._logits_RV[None, : len(logits_to_keep)])


def _nothing_to_replay(work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Record a step whose replay has no work, because its logits are there already."""
    return work(), lambda: None


def _tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({each: index for index, each in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def _decoding(num_seqs: int, observed: Callable[[EngineConfig], Observer]) -> EngineCore:
    """Return an engine whose sequences have all read their prompts."""
    room = _PROMPT + _WARM_STEPS + _STEPS + _PAGE
    max_len = -(-room // _PAGE) * _PAGE
    config = EngineConfig(
        kv_cache_tokens=num_seqs * max_len,
        max_model_len=max_len,
        page_size=_PAGE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
    )
    native = native_rope({"max_position_embeddings": 4096, "head_dim": 64})
    deployment = make_deployment("m", native, DeploymentOptions())
    tables = RopeTables(native, _PAGE, max_len, torch.device("cpu"))
    tables.id_of(deployment.own_tiers[0].profile)
    # No layer writes to it.
    layout = CacheLayout({}, torch.float32, _PAGE)
    store = KVCache(layout, config.num_pages, torch.device("cpu"), row_keys=False)
    tokenizer, newest = _tokenizer(), deque[Output](maxlen=1)
    model = _ReadyLogits(max(num_seqs, 64), tokenizer)
    runner = ModelRunner(model, {}, store, tables, _PAGE)
    limits = CaptureLimits(max_len, num_seqs, config.num_pages)
    runner.capture_graphs(limits, _nothing_to_replay)
    core = EngineCore(runner, config, observed(config))
    for index in range(num_seqs):
        prompt = tuple((index * 31 + at * 7) % 256 for at in range(_PROMPT))
        sampling = SamplingParams(max_tokens=_STEPS + _WARM_STEPS + 64, temperature=0.0)
        tier_choice = deployment.choose(RopeRequest(), len(prompt), sampling.max_tokens)
        request = Request(f"r{index}", prompt, sampling, tier_choice)
        core.add(RequestState.of(request, tokenizer, frozenset({256}), newest.append))
    while core.scheduler.waiting or not all(each.is_decoding for each in core.scheduler.running):
        core.step()
    return core


class _Watched(Metrics):
    """The server's metrics, which also keep the parts of each step."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(MetricFactory(), _CONTEXT_BOUNDS, config, (), {})
        self.parts: list[Mapping[Any, float]] = []

    def timed(self, seconds: Mapping[Any, float]) -> None:
        super().timed(seconds)
        self.parts.append(dict(seconds))


def measure(num_seqs: int) -> dict[str, float]:
    """Return the median milliseconds of a step and of its parts, of the thread's own time."""
    vars(step_timer)["perf_counter"] = time.thread_time
    watched: list[_Watched] = []

    def observed(config: EngineConfig) -> Observer:
        watched.append(_Watched(config))
        return watched[0]

    core = _decoding(num_seqs, observed)
    for _ in range(_WARM_STEPS):
        core.step()
    gc.collect()
    gc.freeze()
    watched[0].parts.clear()
    whole = []
    for _ in range(_STEPS):
        began = time.thread_time()
        num_done = core.step()
        whole.append(time.thread_time() - began)
        assert num_done == num_seqs, "a step without some of the sequences"
    gc.unfreeze()
    parts = {part: median(step[part] for step in watched[0].parts) for part in watched[0].parts[0]}
    return {name: 1000 * seconds for name, seconds in {"step": median(whole), **parts}.items()}


def _measured_in(root: Path, num_seqs: int) -> dict[str, float]:
    """Return what this file measures of the packages in a folder, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(num_seqs)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(  # noqa: S603  # this file
        command, env=environment, cwd=root, check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise click.ClickException(f"the engine of {root} cannot be measured: {done.stderr[-300:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _unpack(revision: str, folder: Path) -> None:
    """Write the files of a git revision to a folder. Raises ClickException if there is none."""
    git = ["git", "-C", str(_ROOT), "archive", revision]
    done = subprocess.run(git, check=False, capture_output=True)  # noqa: S603  # git of the machine
    if done.returncode:
        raise click.ClickException(f"--against: git knows no revision {revision!r}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


@click.command(help=__doc__.partition("\n")[0])
@click.option("--against", metavar="REVISION", help="Measure this git revision, too, in turns.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Processes of each size.")
@click.option("--sequences", default="1,64,256", help="Sizes of a step, with commas.")
@click.option("--child", type=int, hidden=True)
def main(against: str | None, rounds: int, sequences: str, child: int | None) -> None:
    """Print the times as a Markdown table."""
    torch.set_num_threads(1)
    if child is not None:
        click.echo(json.dumps(measure(child)))
        return
    try:
        sizes = [int(each) for each in sequences.split(",")]
    except ValueError:
        raise click.BadParameter("must be numbers with commas", param_hint="--sequences") from None
    if min(sizes) < 1:
        raise click.BadParameter("must be at least 1", param_hint="--sequences")
    with tempfile.TemporaryDirectory() as folder:
        roots = {"this": _ROOT}
        if against is not None:
            _unpack(against, Path(folder))
            roots = {against: Path(folder), **roots}
        for line in _table(roots, sizes, rounds):
            click.echo(line)


def _table(roots: Mapping[str, Path], sizes: list[int], rounds: int) -> list[str]:
    """Return the lines of the table; the roots are measured in turns."""
    lines: list[str] = []
    for size in sizes:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
        for _ in range(rounds):
            for name, root in roots.items():
                found[name].append(_measured_in(root, size))
        for name, runs in found.items():
            if not lines:
                heads = ["sequences", "revision", *(f"{part}, ms" for part in runs[0])]
                lines += [f"| {' | '.join(heads)} |", "|---:|---" + "|---:" * len(runs[0]) + "|"]
            times = [f"{median(run[part] for run in runs):.3f}" for part in runs[0]]
            lines.append(f"| {' | '.join([str(size), name, *times])} |")
    return lines


if __name__ == "__main__":
    main()
