"""Measure the GPU memory of a step by running the largest steps that the limits allow.

One has a long prompt beside decodes. Another has many prompts, whose keys attention gathers
together (prompt_groups.py). With drafts a third one has all rows of a decode step. The largest peak
counts. The cache gets a fraction of the device, minus the weights, this peak and all memory outside
torch's allocator. Logits, logprobs and sampling are part of the first step, because with a large
vocabulary they are its largest tensors. CUDA graphs of decode steps are captured after the cache is
allocated and keep their tensors in a separate pool. If graphs are captured, then an estimate of
their memory is added.

Shapes: R = rows of logits, V = vocabulary.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import (
    build_runner,
    captured_rows,
    captured_tokens,
    captures_graphs,
    layout_of,
)
from ropewalk.model_runtime.engine.memory.cache_size import MemoryProfile
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import MAX_LOGPROBS, SamplingParams
from ropewalk.model_runtime.runner.cuda_graphs import MOST_RECORDED, recorded_sizes
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.runner.prompt_graphs import MOST_PROMPTS, MOST_TOKENS, prompt_sizes
from ropewalk.model_runtime.runner.sampler import SamplingRow, logprobs, rows_at, sample_rows
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope import Profile

# Bytes of one captured step: its launches, and the unused rest of the pool's blocks. An estimate,
# not measured yet.
GRAPH_BYTES = 8 * 2**20
# cuBLAS keeps 32 MiB on a Hopper for each stream with matrix products. There are three: for the
# warm-up, the capture and the replay of steps.
WORKSPACE_BYTES = 3 * 32 * 2**20
# The parameters with the largest sampler tensors. A bias copies the logits. A device without triton
# draws rows without a cut from sums in float64, and sorts some rows under top_p.
_DRAWN = SamplingParams(temperature=1e9, logit_bias=((0, 0.0),))
_RANKED = replace(_DRAWN, top_p=0.9)
_GREEDY = replace(_DRAWN, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """A device's memory at one moment, in bytes."""

    total: int
    free: int  # on the device, after the use of all processes
    reserved: int  # by torch's allocator
    allocated: int  # part of `reserved` that tensors use
    peak: int  # maximum of `allocated` since the last reset

    @property
    def outside(self) -> int:
        """Return the memory of other processes, contexts, code and libraries."""
        return self.total - self.free - self.reserved


class Meter(Protocol):
    """The interface that reads a device's memory."""

    def reset(self) -> None:
        """Free the memory that no tensor holds, and reset the peak."""

    def read(self) -> Reading:
        """Return the current memory, after all queued work is done."""


class CudaMeter:
    """The meter of a CUDA device, with the figures of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
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


def graphs_bytes(
    working_bytes: int, config: EngineConfig, vocab_size: int, num_tokens: int = 0
) -> int:
    """Return the memory of all captured steps, in bytes.

    They share the working tensors of one step and float32 logits, because only one runs at a time.
    Each step of rows has its own page table (int32), and those of prompts share one.
    `num_tokens`: of the largest with prompts that are no rows; 0: there is none.
    """
    sizes = recorded_sizes(config.max_decode_rows, captured_rows(config, num_tokens))
    of_prompts = prompt_sizes(num_tokens)
    logits_bytes = min(config.max_decode_rows, MOST_RECORDED) * 4 * vocab_size
    num_pages = -(-config.max_model_len // config.page_size)
    num_pages *= config.num_groups
    num_tables = sum(sizes) + bool(of_prompts) * (config.max_decode_rows + 1)
    own_bytes = num_tables * 4 * num_pages + (len(sizes) + len(of_prompts)) * GRAPH_BYTES
    return working_bytes + logits_bytes + own_bytes + WORKSPACE_BYTES


def profile_memory(
    checkpoint: Checkpoint,
    config: EngineConfig,
    profiles: Sequence[Profile],
    utilization: float,
    meter: Meter,
    *,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> MemoryProfile:
    """Run the largest steps over a cache of one page, and free that cache afterwards.

    `config`: kv_cache_tokens is not known yet and not read. `profiles`: all profiles that will be
    served, at least one. `make`: the class of the model runner. Raises ModelError if the step does
    not fit into memory.
    """
    gc.collect()
    meter.reset()
    before = meter.read()
    # No context is longer than a cache with all the memory left after the weights.
    room = int(before.total * utilization) - before.outside - before.allocated
    most = max(config.page_size, room // layout_of(checkpoint, config).token_bytes)
    longest = replace(config, kv_cache_tokens=most).longest_context
    context_len = min(config.max_model_len, max(longest, config.page_size))
    tried = replace(
        config,
        kv_cache_tokens=config.page_size,
        max_model_len=context_len,
        num_state_slots=1 if checkpoint.states else 0,  # like the page, for every sequence
    )
    try:
        runner = build_runner(checkpoint, tried, profiles, make)
        # A prompt under a position method needs the most, a sum in float32 (prefill.py).
        placed = [profile for profile in profiles if profile.positions is not None]
        table_id = runner.table_id((placed or profiles)[-1])
        run_step(runner, largest_step(tried, table_id, checkpoint.vocab_size))
        runner.run(crowded_step(tried, table_id, checkpoint.vocab_size))
        if config.max_decode_rows > config.max_num_seqs:  # all rows of drafts are sampled at once
            run_step(runner, decode_step(tried, table_id, checkpoint.vocab_size))
        after = meter.read()
        graph_bytes = 0
        if captures_graphs(checkpoint, config):
            meter.reset()
            begun = meter.read()
            # Sampling is not captured.
            num_tokens = captured_tokens(checkpoint, config, profiles, make)
            runner.run(captured_step(tried, table_id, checkpoint.vocab_size, num_tokens))
            if prompt_sizes(num_tokens):
                largest = replace(
                    tried,
                    max_num_batched_tokens=min(num_tokens, MOST_TOKENS),
                    max_num_seqs=MOST_PROMPTS,
                )
                runner.run(crowded_step(largest, table_id, checkpoint.vocab_size))
            working_bytes = meter.read().peak - begun.allocated
            graph_bytes = graphs_bytes(working_bytes, tried, checkpoint.vocab_size, num_tokens)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"a step of {config.max_num_batched_tokens} tokens with {config.max_num_logit_rows} "
            f"scored positions and {config.max_num_seqs} sequences finds no memory beside the "
            f"weights, lower max_num_batched_tokens or max_num_seqs: {error}"
        ) from error
    del runner
    gc.collect()
    meter.reset()
    return MemoryProfile(
        after.total, after.outside, before.allocated, after.peak - before.allocated, graph_bytes
    )


@torch.inference_mode()
def run_step(runner: ModelRunner, spans: Sequence[Span]) -> None:
    """Run a forward and the work of `postprocess.py` on its logits; the results are discarded.

    One token is sampled for every sequence, once in each way with large tensors. Then logprobs are
    computed for all rows, like those of a prompt, and for the sampled rows.
    """
    logits_RV = runner.run(spans)
    places = [end - 1 for end in accumulate(len(span.logit_rows) for span in spans)]
    for params in (_DRAWN, _RANKED):
        # A greedy row makes the sampler copy the others.
        num_greedy = min(1, len(spans) - 1)
        every = [_GREEDY] * num_greedy + [params] * (len(spans) - num_greedy)
        sample_rows(logits_RV, places, [SamplingRow(each, 0, frozenset()) for each in every])
    for rows_RV in (logits_RV, rows_at(logits_RV, places)):
        num_rows = len(rows_RV)
        logprobs(rows_RV, [0] * num_rows, [MAX_LOGPROBS] * num_rows)


def captured_step(
    config: EngineConfig, table_id: int, vocab_size: int, num_tokens: int
) -> list[Span]:
    """Return the spans of the largest captured step of rows: one token each, logits for the first.

    `num_tokens`: as for `graphs_bytes`.
    """
    num_logits = min(config.max_decode_rows, MOST_RECORDED)
    most = recorded_sizes(config.max_decode_rows, captured_rows(config, num_tokens))[-1]
    spans = decode_step(
        replace(config, max_num_seqs=most, max_draft_tokens=0), table_id, vocab_size
    )
    return [*spans[:num_logits], *(each._replace(logit_rows=()) for each in spans[num_logits:])]


def decode_step(config: EngineConfig, table_id: int, vocab_size: int) -> list[Span]:
    """Return the spans of the largest captured step of decodes, one token per row."""
    most = min(config.max_decode_rows, MOST_RECORDED)
    decodes = replace(config, max_num_seqs=most, max_num_batched_tokens=most, max_num_logit_rows=1)
    return largest_step(decodes, table_id, vocab_size)


def largest_step(config: EngineConfig, table_id: int, vocab_size: int) -> list[Span]:
    """Return spans that use all limits, each at the end of a context of max_model_len.

    The first span has the maximum number of tokens and the others the rest, at least one each.
    This is the shape of a long prompt beside decoding sequences. The last positions of the first
    span are scored, up to the limit. Each other span has at least one row, the last.
    """
    tokens_left, rows_left = config.max_num_batched_tokens, config.max_num_logit_rows
    spans = []
    for num_after in reversed(range(min(config.max_num_seqs, tokens_left))):
        num_tokens = min(config.max_model_len, tokens_left - num_after)
        num_rows = max(1, min(num_tokens, rows_left))
        tokens_left -= num_tokens
        rows_left = max(0, rows_left - num_rows)
        spans.append(_last_tokens(config, num_tokens, num_rows, table_id, vocab_size))
    return spans


def crowded_step(config: EngineConfig, table_id: int, vocab_size: int) -> list[Span]:
    """Return spans of as many prompts as the limits allow, all with as many tokens.

    Each is at the end of a context of max_model_len and has one row of logits, the last.
    """
    num_prompts = max(1, min(config.max_num_seqs, config.max_num_batched_tokens // 2))
    num_tokens = min(config.max_model_len, config.max_num_batched_tokens // num_prompts)
    return [_last_tokens(config, num_tokens, 1, table_id, vocab_size)] * num_prompts


def _last_tokens(
    config: EngineConfig, num_tokens: int, num_rows: int, table_id: int, vocab_size: int
) -> Span:
    """Return the last tokens of the longest context, with the last rows of logits.

    Page 0 is used for every page, because its content changes no tensor's size. So is slot 0.
    """
    return Span(
        [at % vocab_size for at in range(num_tokens)],
        config.max_model_len - num_tokens,
        [0] * (-(-config.max_model_len // config.page_size) * config.num_groups),
        table_id,
        range(num_tokens - num_rows, num_tokens),
        (StatePart(num_tokens, None, 0),) if config.num_state_slots else (),
    )
