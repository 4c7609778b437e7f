"""What a step takes of a GPU's memory: the largest that the limits allow is run, and measured.

The cache gets what weights, such a step and everything outside torch's allocator leave of a share
of the device. Logits, logprobs and sampling are part of the step: with a large vocabulary they are
its largest tensors. Where decode steps are recorded as graphs, which happens after the cache is
there and keeps tensors in a pool of their own, what they will take is added.

Shapes: R = rows of logits, V = vocabulary.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch

from model_runtime.batch import Span
from model_runtime.cache.kv_cache import bytes_per_token
from model_runtime.config import EngineConfig
from model_runtime.engine.build_engine import build_runner, captures_graphs
from model_runtime.errors import ModelError
from model_runtime.loading.checkpoint import Checkpoint
from model_runtime.request import MAX_LOGPROBS, SamplingParams
from model_runtime.runner.cuda_graphs import recorded_sizes
from model_runtime.runner.model_runner import ModelRunner
from model_runtime.runner.sampler import SamplingRow, choose, logprobs, rows_at
from rope import Profile

# Of one recorded step: its launches, and what is left over in the blocks of the pool. A guess, not
# measured yet.
GRAPH_BYTES = 8 * 2**20
# cuBLAS keeps 32 MiB on a Hopper for each stream that multiplies: where steps are tried, recorded
# and replayed.
WORKSPACE_BYTES = 3 * 32 * 2**20
# All that makes the sampler's tensors: a copy of the logits for the bias, and ranks for top_p.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, logit_bias=((0, 0.0),))


@dataclass(frozen=True, slots=True)
class Reading:
    """A device's memory at one moment, in bytes."""

    total: int
    free: int  # of the device, whoever has the rest
    reserved: int  # by torch's allocator
    allocated: int  # of that, by tensors
    peak: int  # most that tensors have had since the last reset

    @property
    def outside(self) -> int:
        """What torch's allocator does not know: other processes, contexts, code, libraries."""
        return self.total - self.free - self.reserved


class Meter(Protocol):
    """Reads a device's memory."""

    def reset(self) -> None:
        """Give back what no tensor holds, and forget the peak."""

    def read(self) -> Reading:
        """How it is now, with all that was queued done."""


class CudaMeter:
    """The memory of a CUDA device, and what torch's allocator says of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """As in Meter."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> Reading:
        """As in Meter."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return Reading(
            total,
            free,
            torch.cuda.memory_reserved(self._device),
            torch.cuda.memory_allocated(self._device),
            torch.cuda.max_memory_allocated(self._device),
        )


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What a device's memory goes to, in bytes."""

    total_bytes: int
    outside_bytes: int  # see Reading.outside; with what the step brought in
    weight_bytes: int  # tensors that were there before the step
    step_bytes: int  # most that the step's tensors took beside them
    graph_bytes: int  # what recorded decode steps will keep; 0 where none are recorded

    def cache_bytes(self, utilization: float) -> int:
        """What is left for the cache of `utilization` of the device; negative if nothing is."""
        taken = self.outside_bytes + self.weight_bytes + self.step_bytes + self.graph_bytes
        return int(self.total_bytes * utilization) - taken


def graphs_bytes(working_bytes: int, config: EngineConfig, vocab_size: int) -> int:
    """What all recorded decode steps keep: one's tensors, which the others use in turn.

    Beside these each has float32 logits and a page table (int32) of its own.
    """
    sizes = recorded_sizes(config.max_num_seqs)
    num_pages = -(-config.max_model_len // config.page_size)
    own_bytes = sum(sizes) * 4 * (vocab_size + num_pages) + len(sizes) * GRAPH_BYTES
    return working_bytes + own_bytes + WORKSPACE_BYTES


def profile_memory(
    checkpoint: Checkpoint,
    config: EngineConfig,
    profiles: Sequence[Profile],
    utilization: float,
    meter: Meter,
) -> MemoryProfile:
    """Run the largest step over a cache of one page, which is gone afterwards.

    `config`: its kv_cache_tokens are not known yet and not read. `profiles`: all that will be
    served, one at least. Raises ModelError if the step alone finds no memory.
    """
    gc.collect()
    meter.reset()
    before = meter.read()
    # No context is longer than what the cache could hold if a step took nothing.
    room = int(before.total * utilization) - before.outside - before.allocated
    most = room // bytes_per_token(checkpoint.plans, checkpoint.dtype)
    context_len = min(config.max_model_len, max(most, config.page_size))
    tried = replace(config, kv_cache_tokens=config.page_size, max_model_len=context_len)
    try:
        runner = build_runner(checkpoint, tried, profiles)
        slot = runner.table_slot(profiles[-1])
        run_step(runner, largest_step(tried, slot, checkpoint.vocab_size))
        after = meter.read()
        graph_bytes = 0
        if captures_graphs(checkpoint, config):
            meter.reset()
            begun = meter.read()
            runner.run(decode_step(tried, slot, checkpoint.vocab_size))  # sampling is not recorded
            working_bytes = meter.read().peak - begun.allocated
            graph_bytes = graphs_bytes(working_bytes, tried, checkpoint.vocab_size)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"a step of {config.max_num_batched_tokens} tokens with {config.max_num_logit_rows} "
            f"scored positions and {config.max_num_seqs} sequences finds no memory beside the "
            f"weights, lower max_num_batched_tokens, max_num_logit_rows or max_num_seqs: {error}"
        ) from error
    del runner
    gc.collect()
    meter.reset()
    return MemoryProfile(
        after.total, after.outside, before.allocated, after.peak - before.allocated, graph_bytes
    )


@torch.inference_mode()
def run_step(runner: ModelRunner, spans: Sequence[Span]) -> None:
    """A forward and what `postprocess.py` makes of its logits; the answers mean nothing.

    Every sequence gets a token, all rows are scored as a prompt's are, then those that were chosen.
    """
    logits_RV = runner.run(spans)
    places = [end - 1 for end in accumulate(len(span.logit_rows) for span in spans)]
    choose(logits_RV, places, [SamplingRow(_SAMPLING, 0, frozenset()) for _ in spans])
    for rows_RV in (logits_RV, rows_at(logits_RV, places)):
        num_rows = len(rows_RV)
        logprobs(rows_RV, [0] * num_rows, [MAX_LOGPROBS] * num_rows)


def decode_step(config: EngineConfig, table_slot: int, vocab_size: int) -> list[Span]:
    """One token of as many sequences as are recorded."""
    most = recorded_sizes(config.max_num_seqs)[-1]
    decodes = replace(config, max_num_seqs=most, max_num_batched_tokens=most, max_num_logit_rows=1)
    return largest_step(decodes, table_slot, vocab_size)


def largest_step(config: EngineConfig, table_slot: int, vocab_size: int) -> list[Span]:
    """Spans that use all of the limits, each at the end of a context of max_model_len.

    The first has all the tokens it can, the others what is left, one at least: as when sequences
    decode beside a long prompt. Its last positions are scored, as many as may be; of the others
    the last is sampled. Page 0 stands for every page: what is in it changes no tensor's size.
    """
    pages = [0] * -(-config.max_model_len // config.page_size)
    tokens_left, rows_left = config.max_num_batched_tokens, config.max_num_logit_rows
    spans = []
    for num_after in reversed(range(min(config.max_num_seqs, tokens_left))):
        num_tokens = min(config.max_model_len, tokens_left - num_after)
        num_rows = max(1, min(num_tokens, rows_left))
        tokens_left -= num_tokens
        rows_left = max(0, rows_left - num_rows)
        token_ids = [at % vocab_size for at in range(num_tokens)]
        first = config.max_model_len - num_tokens
        rows = range(num_tokens - num_rows, num_tokens)
        spans.append(Span(token_ids, first, pages, table_slot, rows))
    return spans
