"""Compare the logits of the patched model with those of the original model, at a load.

The original model runs first (probing/untouched.py) and is then patched in place, so the weights
are never held twice.

There are two checks with the same cases. That of the structure runs with random numbers instead of
the weights (probing/random_numbers.py), in float32. Rounding is small there, so a small error is
found whatever the weights are: another table, window, order of pairs or scale. It is made before
modules are replaced. The second check runs with the weights, over the kernels that serve. Its
allowance is measured, because rounding depends on the weights (probing/rounding.py).

The check changes nothing in the model. `install_forward.py` follows it.

Shapes: T = tokens of a prompt, V = vocabulary.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.eight_bits import Scales, scales_of
from ropewalk.model_runtime.attention.kv_cache import KVCache
from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.probing.probe import mixing_class
from ropewalk.model_runtime.probing.random_numbers import random_numbers
from ropewalk.model_runtime.probing.untouched import (
    LONG_LEN,
    SCALED,
    SHORT_LEN,
    OriginalLogits,
    PromptIds,
    difference,
    windows_shrunk,
)
from ropewalk.model_runtime.runner.backends import backend_for, exact_backend, state_store
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.state_shape import StatePart, StateShape
from ropewalk.rope import NativeRope, Profile

_PAGE_SIZE = 16
# The long prompt is also run in pieces: the tokens up to 31, then up to 44, then single tokens. The
# last of these reads nothing of a chunk in a convolution of four taps.
FIRST_CHUNK_END, DECODE_START = 31, 44


@dataclass(frozen=True, slots=True)
class SelfCheckReport:
    """The outcome of a self-check that passed."""

    difference: float  # largest difference in a logit
    threshold: float
    # Same bits alone, in a batch, in chunks and token by token; on a GPU only by exact_batches.
    bitwise: bool


class PagedPrompts:
    """The prompts of the check, over a paged cache of the patched model.

    `check` and `install_forward` share it, so that the plain run of the long prompt is made once.
    """

    def __init__(
        self,
        model: nn.Module,
        plans: Mapping[int, LayerPlan],
        native: NativeRope,
        ids: PromptIds,
        *,
        is_structure: bool = False,
        states: Mapping[int, StateShape] | None = None,
        exact_batches: bool = False,
    ) -> None:
        """Allocate a cache for two prompts.

        `states`: those of a model with states, by layer. `is_structure`: the model computes in
        float32, and no compiled attention is needed. `exact_batches`: a GPU reads by the backend of
        that setting.
        """
        self.model, self.plans, self.ids = model, plans, ids
        num_pages = -(-LONG_LEN // _PAGE_SIZE)
        self._pages = range(num_pages), range(num_pages, 2 * num_pages)
        parameter = next(model.parameters())
        dtype = torch.float32 if is_structure else parameter.dtype
        self._backend = TorchAttention if is_structure else backend_for(parameter.device)
        if exact_batches:
            self._backend = exact_backend()
        self._store = KVCache(
            CacheLayout(plans, dtype, _PAGE_SIZE),
            2 * num_pages,
            parameter.device,
            row_keys=self._backend.row_keys,
        )
        self._states = state_store(states or {}, 2, parameter.device)
        self._tables = RopeTables(native, _PAGE_SIZE, LONG_LEN, parameter.device)
        self._native = Profile(native.tables[native.scaled_layer_type].scaling)

    def runner(self) -> ModelRunner:
        """Return a new runner over the prompts' cache."""
        return ModelRunner(
            self.model,
            self.plans,
            self._store,
            self._tables,
            _PAGE_SIZE,
            backend=self._backend,
            states=self._states,
        )

    def span(
        self,
        token_ids: Sequence[int],
        first: int,
        *,
        profile: Profile | None = None,
        logit_rows: Sequence[int] | None = None,
        in_second_pages: bool = False,
    ) -> Span:
        """Return a span that begins at position `first`; all its rows have logits by default."""
        table_id = self._tables.id_of(profile or self._native)
        rows = range(len(token_ids)) if logit_rows is None else logit_rows
        parts: tuple[StatePart, ...] = ()
        if self._states is not None:
            slot = int(in_second_pages)
            parts = (StatePart(len(token_ids), slot if first else None, slot),)
        return Span(token_ids, first, self._pages[in_second_pages], table_id, rows, parts)

    def long(self, first: int, end: int, logit_rows: Sequence[int] | None = None) -> Span:
        return self.span(self.ids.long[first:end], first, logit_rows=logit_rows)

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Return the logits [R, V]. Raises ModelError for any error of the model."""
        try:
            return self._plain_runner.run(spans)
        except Exception as error:
            raise ModelError(
                f"{type(self.model).__name__} does not run over a paged cache: "
                f"{type(error).__name__}: {error}"
            ) from error

    @cached_property
    def long_TV(self) -> Tensor:
        """Return the logits of the long prompt alone, in one piece; it runs at the first use."""
        return self.run([self.long(0, LONG_LEN)])

    @torch.inference_mode()
    def digest(self) -> str:
        """Run both prompts, each alone, and return a hash of the bits of their logits.

        The last token of the long one is a decode step, which has kernels of its own.
        """
        found, last = hashlib.sha256(), LONG_LEN - 1
        short = self.span(self.ids.short, 0, in_second_pages=True)
        for span in (self.long(0, last), self.long(last, LONG_LEN), short):
            found.update(self.run([span]).float().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def scales(self) -> dict[int, Scales]:
        """Return the scales of codes of eight bits for the prompts that `digest` has run."""
        pairs = {
            index: plan.rotary_dim // 2 if plan.layer_type is not None else 0
            for index, plan in self.plans.items()
        }
        found = {}
        for index, num_pairs in pairs.items():
            keys_NKDO, values_NKOV = self._store.pages(index)
            key_TKD = keys_NKDO.permute(0, 3, 1, 2).flatten(0, 1)
            value_TKV = values_NKOV.transpose(1, 2).flatten(0, 1)
            # The long prompt fills its pages, and the short one follows it.
            prompts = slice(LONG_LEN + SHORT_LEN)
            firsts = (0, LONG_LEN)
            found[index] = scales_of(key_TKD[prompts], value_TKV[prompts], num_pairs, firsts)
        return found

    @cached_property
    def _plain_runner(self) -> ModelRunner:
        return self.runner()


@torch.inference_mode()
def check_structure(
    model: nn.Module,
    plans: Mapping[int, LayerPlan],
    native: NativeRope,
    original: OriginalLogits,
    states: Mapping[int, StateShape] | None = None,
) -> None:
    """Compare a patched model with the original, both with random numbers. Raises ModelError."""
    with random_numbers(model, dtype=torch.float32):
        try:
            prompts = PagedPrompts(
                model, plans, native, original.ids, is_structure=True, states=states
            )
            check(prompts, original)
        except ModelError as error:
            mixing = mixing_class(model)
            if mixing is None:
                raise
            raise ModelError(
                f"{type(model).__name__}: {mixing} mixes tokens by a state of each sequence, which "
                "is not served for this class yet"
            ) from error


@torch.inference_mode()
def check(prompts: PagedPrompts, original: OriginalLogits) -> SelfCheckReport:
    """Run the patched model on the same prompts. Raises ModelError if a difference is too large."""
    long_ids, short_ids = prompts.ids
    run, long = prompts.run, prompts.long
    # case -> logits of the patched model, logits of the original
    cases: dict[str, tuple[Tensor, Tensor]] = {}
    with windows_shrunk(prompts.model):
        cases["one prompt"] = prompts.long_TV, original.long_TV
        scaled_TV = run([prompts.span(long_ids, 0, profile=Profile(SCALED))])
        cases["a scaled table"] = scaled_TV, original.scaled_TV
        short = prompts.span(short_ids, 0, in_second_pages=True)
        both_TV = run([long(0, FIRST_CHUNK_END), short])
        cases["two sequences in one flat batch"] = both_TV[FIRST_CHUNK_END:], original.short_TV
        first_TV, second_TV = both_TV[:FIRST_CHUNK_END], run([long(FIRST_CHUNK_END, DECODE_START)])
        cases["a first chunk"] = first_TV, original.long_TV[:FIRST_CHUNK_END]
        cases["a second chunk"] = second_TV, original.long_TV[FIRST_CHUNK_END:DECODE_START]
        decoded_TV = torch.cat([run([long(at, at + 1)]) for at in range(DECODE_START, LONG_LEN)])
        cases["decode steps"] = decoded_TV, original.long_TV[DECODE_START:]
    differences = []
    for case, logits in cases.items():
        differences.append(difference(*logits, original.compared))
        if not differences[-1] <= original.threshold:  # NaN fails too
            raise ModelError(
                f"{type(prompts.model).__name__} fails its self-check on {case}: a logit differs "
                f"by {differences[-1]:.3g} from the untouched model's, {original.threshold:.3g} is "
                "allowed"
            )
    # On a GPU a product's order of additions follows the number of rows, and the check has so few
    # rows that it may not show.
    is_bitwise = prompts.long_TV.device.type == "cpu" and torch.equal(
        torch.cat([first_TV, second_TV, decoded_TV]), prompts.long_TV
    )
    return SelfCheckReport(max(differences), original.threshold, is_bitwise)


@torch.inference_mode()
def has_same_bits(prompts: PagedPrompts) -> bool:
    """Return whether the long prompt's logits do not depend on a second prompt and on chunks."""
    run, long = prompts.run, prompts.long
    with windows_shrunk(prompts.model):
        short = prompts.span(prompts.ids.short, 0, in_second_pages=True)
        parts = [run([long(0, FIRST_CHUNK_END), short])[:FIRST_CHUNK_END]]
        parts.append(run([long(FIRST_CHUNK_END, DECODE_START)]))
        parts += [run([long(at, at + 1)]) for at in range(DECODE_START, LONG_LEN)]
        return torch.equal(torch.cat(parts), prompts.long_TV)
