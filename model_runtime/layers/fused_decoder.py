"""The forward of a plain decoder on a CPU, without PyTorch calls between its kernels.

Most models with rotary embeddings have the same design: an embedding, layers and a head. Each layer
adds norm, attention, norm and a gated block to one hidden state. A model's own forward takes about
forty PyTorch calls per layer, with copies of queries, keys and values between them. Here a layer is
four products and four passes over memory. If a step has few rows, all layers are one call
(fused_decode.py).

match_decoder.py finds the models that have this design, and self_check.py tries the forward.

Shapes: T = flat tokens, R = rows, E = dimensions of the hidden state, C = columns that hold
queries, keys and values head beside head, V = vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.cpu_backend import CpuAttention, RangedSequences
from ropewalk.model_runtime.attention.paged_attention import STEP, LayerPlan, PagedStep
from ropewalk.model_runtime.cpu_kernels.elementwise import (
    add_and_normalize,
    as_numpy,
    as_tensor,
    normalize,
    normalize_heads,
)
from ropewalk.model_runtime.cpu_kernels.fused_decode import layer_fields, runner_for
from ropewalk.model_runtime.cpu_kernels.kernel_arguments import (
    AttentionParams,
    FusedStep,
    Heads,
    Ints,
    LayerOutputs,
    Numbers,
)
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import Multiplying
from ropewalk.model_runtime.cpu_kernels.threads import ABORT, MOST_THREADS, run_thread_team
from ropewalk.model_runtime.layers.gated_mlp import GatedMlp
from ropewalk.model_runtime.layers.last_layer import PrunedStep
from ropewalk.model_runtime.layers.packed_product import PackedProduct
from ropewalk.model_runtime.layers.rms_norm import RmsNorm

_BYTES_PER_THREAD = 4 << 20  # of weights; with fewer, a thread costs more time than it saves


class Logits(NamedTuple):
    """The result of a forward."""

    logits: Tensor  # [1, R, V]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's parts, in the order of the computation."""

    index: int  # of its pages
    norm: RmsNorm
    joined: PackedProduct  # queries, keys and values
    head_norms: tuple[RmsNorm, ...]  # of queries and of keys, or none
    output: PackedProduct
    block_norm: RmsNorm
    block: GatedMlp


class Kind(NamedTuple):
    """The properties that all layers have in common."""

    plan: LayerPlan
    num_heads: int  # of queries
    scaling: float
    num_head_norms: int
    num_between: int  # dimensions between a block's products

    @property
    def heads(self) -> Heads:
        plan = self.plan
        dims = (plan.num_key_heads, plan.key_dim, plan.value_dim)
        return Heads(self.num_heads, *dims, self.num_head_norms > 0)


class DecoderLayers:
    """A model's forward over a paged cache; other calls go to the model's own forward."""

    def __init__(
        self,
        model: Any,
        layers: list[Layer],
        final_norm: RmsNorm,
        kind: Kind,
        plans: Mapping[int, LayerPlan],
    ) -> None:
        self.own_forward = model.forward
        self._embed = model.get_input_embeddings()
        self._head: PackedProduct = model.get_output_embeddings().product
        self._layers, self._heads = layers, kind.heads
        self._norms = [each.norm for each in layers[1:]] + [final_norm]  # after each layer
        self._eps, self._kind, self._plans = final_norm.eps, kind, plans
        self._dtype = next(model.parameters()).dtype
        self._num_bytes = 0  # of weights that the kernel reads
        self._multiplying: Multiplying | None = None
        self._fields_LW = self._fields()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the logits of the requested rows; other steps go to the model's own forward."""
        step = named.get(STEP)
        every, pruned, rows_R = step, None, None
        if isinstance(step, PrunedStep):
            every, pruned, rows_R = step.every, step.pruned, step.rows_R.numpy()
        if not self._is_ours(every) or not (pruned is None or self._is_ours(pruned)):
            return self.own_forward(*arguments, **named)
        hidden_TE = as_numpy(self._embed(named["input_ids"])[0])
        if pruned is None and self._is_one_call(len(hidden_TE)) and self._ranged(every) is None:
            normal_RE = self._all_at_once(hidden_TE, every)
        else:
            normal_RE = self._one_by_one(hidden_TE, every, pruned, rows_R)
        rows = named["logits_to_keep"].numpy()
        if len(rows) != len(normal_RE):
            normal_RE = normal_RE[rows]
        return Logits(as_tensor(self._head.multiply(normal_RE), self._dtype)[None])

    def _one_by_one(
        self, hidden_TE: Numbers, every: PagedStep, pruned: PagedStep | None, rows_R: Ints | None
    ) -> Numbers:
        """Return the final norm of every token, or of those that the last layer computes."""
        normal_TE = np.empty_like(hidden_TE)
        normalize(hidden_TE, self._layers[0].norm.scale_D, self._eps, normal_TE)
        num_heads = self._heads.num_query_heads
        step, params = every, self._params(every)
        for layer, next_norm in zip(self._layers, self._norms, strict=True):
            joined_TC = layer.joined.multiply(normal_TE)
            self._normalize_heads(layer, joined_TC)
            pages = every.store.arrays[layer.index]
            _cpu(every).write_joined(joined_TC, num_heads, pages)
            if pruned is not None and layer is self._layers[-1]:
                step, params = pruned, self._params(pruned)
                joined_TC, hidden_TE = joined_TC[rows_R], hidden_TE[rows_R]
                normal_TE = np.empty_like(hidden_TE)
            attended_TC = _cpu(step).attend(joined_TC, num_heads, pages, params, self._ranged(step))
            output_TE = layer.output.multiply(attended_TC)
            norm_E = layer.block_norm.scale_D
            add_and_normalize(hidden_TE, output_TE, norm_E, self._eps, normal_TE)
            output_TE = layer.block.multiply(normal_TE)
            add_and_normalize(hidden_TE, output_TE, next_norm.scale_D, self._eps, normal_TE)
        return normal_TE

    def _normalize_heads(self, layer: Layer, joined_TC: Numbers) -> None:
        heads = self._heads
        if layer.head_norms:
            query_norm, key_norm = layer.head_norms
            key_at = heads.num_query_heads * heads.dim
            normalize_heads(joined_TC, 0, heads.num_query_heads, query_norm.scale_D, self._eps)
            normalize_heads(joined_TC, key_at, heads.num_key_heads, key_norm.scale_D, self._eps)

    def _all_at_once(self, hidden_RE: Numbers, step: PagedStep) -> Numbers:
        """Return the final norm of every row."""
        first_E = self._layers[0].norm.scale_D
        normal_RE = np.empty_like(hidden_RE)
        normalize(hidden_RE, first_E, self._eps, normal_RE)
        heads, backend, block = self._heads, _cpu(step), self._layers[0].block
        shares = backend.partitioned(heads.num_query_heads, heads.dim, heads.num_key_heads)
        num_threads = max(len(shares), self._num_threads())
        shares = shares + [shares[0][:0]] * (num_threads - len(shares))
        num_rows, dtype = len(hidden_RE), hidden_RE.dtype
        pages = step.store.arrays[self._layers[0].index]
        assert self._multiplying is not None
        assert self._fields_LW is not None
        run = runner_for(self._multiplying, pages.keys_NKDO)
        plain_step = FusedStep(
            outputs=LayerOutputs(
                joined_RC=np.empty((num_rows, self._layers[0].joined.out_features), dtype),
                attended_RC=np.empty((num_rows, heads.num_query_heads * heads.value_dim), dtype),
                output_RE=np.empty((num_rows, hidden_RE.shape[1]), dtype),
                both_RG=np.empty((num_rows, block.gate_up.out_features), dtype),
            ),
            fields_LW=self._fields_LW,
            addresses_L2=step.store.addresses_L2,
            pages=pages,
            heads=heads,
            eps=self._eps,
            like_scale=first_E,
            destinations=backend.destinations,
            sequences=backend.sequences,
            params=self._params(step),
        ).unnamed()
        arrived = np.zeros(1, np.int64)

        def work(thread: int) -> None:
            own = (hidden_RE, normal_RE)
            if thread:
                own = (hidden_RE.copy(), normal_RE.copy())
            run(thread, num_threads, arrived, *own, shares[thread], plain_step)

        run_thread_team(work, num_threads, lambda: arrived.fill(ABORT))
        return normal_RE

    def _params(self, step: PagedStep) -> AttentionParams:
        """Return the parameters of every layer's attention: no window, soft cap or sinks."""
        tables = step.tables.layer(self._kind.plan.layer_type).kernel_arrays
        return AttentionParams(tables, np.float32(self._kind.scaling))

    def _ranged(self, step: PagedStep) -> RangedSequences | None:
        """Return the step's sequences that read ranges, which the one call does not take."""
        return _cpu(step).ranged(step.tables.layer(self._kind.plan.layer_type))

    def _is_ours(self, step: Any) -> TypeGuard[PagedStep]:
        """Return whether the step reads the cache as the model's layers do, on a CPU."""
        return (
            type(step) is PagedStep
            and step.plans is self._plans
            and isinstance(step.backend, CpuAttention)
        )

    def _is_one_call(self, num_rows: int) -> bool:
        """Return whether the kernel takes `num_rows`, and the trial of its products still holds."""
        return self._fields_LW is not None and self._layers[0].joined.skinny(num_rows) is not None

    def _num_threads(self) -> int:
        """Return the number of threads that the size of all layers' weights is worth."""
        most = min(torch.get_num_threads(), MOST_THREADS)
        return max(1, min(most, self._num_bytes // _BYTES_PER_THREAD))

    def _fields(self) -> Ints | None:
        """Return every layer's fields for the kernel, int64 [L, W]; None if it cannot run them."""
        fields = []
        for layer, next_norm in zip(self._layers, self._norms, strict=True):
            products = (layer.joined, layer.output, layer.block.gate_up, layer.block.down)
            found = (product.skinny(1) for product in products)
            skinny = [each for each in found if each is not None]
            kinds = {each.multiplying for each in skinny} | {self._multiplying} - {None}
            if len(skinny) < len(products) or len(kinds) > 1:
                return None
            (self._multiplying,) = kinds
            self._num_bytes += sum(each.num_bytes for each in skinny)
            norms = (layer.block_norm, next_norm, *layer.head_norms)
            fields.append(layer_fields(skinny, [norm.scale_D for norm in norms]))
        return np.array(fields, np.int64)


def _cpu(step: PagedStep) -> CpuAttention:
    assert isinstance(step.backend, CpuAttention)
    return step.backend


def restore(model: nn.Module) -> None:
    if isinstance(vars(model).get("forward"), DecoderLayers):
        del model.forward
