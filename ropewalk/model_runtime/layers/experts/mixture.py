"""A layer with experts whose routing and experts are compiled, without calls of torch between them.

A block's own code is run once with prescribed logits, and its experts note what they are given. So
its rule is found by trial, and not by name: the experts with the largest logits, with a softmax
over them or over all experts. A block with another rule, with shared experts or with groups keeps
its own code (`routing.py`).

Shapes: R = rows, E = experts, C = choices of a row, K = inputs, N = outputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Numbers
from ropewalk.model_runtime.cpu_kernels.elementwise import as_numpy, as_tensor
from ropewalk.model_runtime.cpu_kernels.experts.gates import Gate
from ropewalk.model_runtime.cpu_kernels.experts.routing import routed
from ropewalk.model_runtime.cpu_kernels.skinny_gemm import (
    FLOAT32,
    RowProducts,
    own_panels,
    widened,
)
from ropewalk.model_runtime.layers.experts.packed import PackedExperts
from ropewalk.model_runtime.layers.experts.routing import RuledForward, Rules
from ropewalk.model_runtime.probing.equivalence import trial_rows

_INTEGERS = {torch.int32, torch.int64}
_SCALES = (0.3, 1.0, 2.0, 4.0, 0.0)  # of prescribed logits; in the last row all are equal
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.004}  # of weights, by their number type


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The forward of a block with a router and experts."""

    ruled: RuledForward  # the block's own, for calls with other arguments
    experts: PackedExperts
    gate: Gate
    router: RowProducts
    num_choices: int
    is_normalised: bool
    is_pair: bool  # whether the block returns the weights, too
    weights_dtype: torch.dtype  # bfloat16: weights are rounded to it

    @property
    def num_experts(self) -> int:
        """Return the number of experts, which is that of the router's outputs."""
        return self.experts.num_experts

    @property
    def is_rounded(self) -> bool:
        """Return whether the weights of experts are rounded to bfloat16."""
        return self.weights_dtype == torch.bfloat16

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Compute the block, [..., K] -> [..., N]."""
        if named or len(arguments) != 1:
            return self.ruled(*arguments, **named)
        (x,) = arguments
        x_RK = as_numpy(x.contiguous()).reshape(-1, x.shape[-1])
        choice_RC, weights_RC = self._routed(x_RK)
        out = as_tensor(self.experts.multiply(x_RK, choice_RC, weights_RC), x.dtype)
        out = out.view(*x.shape[:-1], -1)
        weights_RC = torch.from_numpy(weights_RC).to(self.weights_dtype)  # exact
        return (out, weights_RC) if self.is_pair else out

    def multiply(self, x_RK: Numbers) -> Any:
        """Compute the block, [R, K] -> [R, N]; numpy arrays of float32 or of bf16's bits."""
        return self.experts.multiply(x_RK, *self._routed(x_RK))

    def _routed(self, x_RK: Numbers) -> tuple[Any, Any]:
        logits_RE: Any = self.router.multiply(widened(x_RK))
        return routed(
            logits_RE, self.num_choices, is_normalised=self.is_normalised,
            is_rounded=self.is_rounded,
        )  # fmt: skip


@torch.inference_mode()
def mixture_of(
    block: Any, experts: Any, rules: Rules, dtype: torch.dtype
) -> Mixture | None:  # fmt: skip
    """Return the compiled forward of a block with these packed experts; None if it has another.

    `dtype` is the number type of rows.
    """
    if len(rules.weights) != 1 or not isinstance(experts, PackedExperts) or experts.gate is None:
        return None
    (weight,) = rules.weights
    bias = _bias_beside(block, weight)
    drawn_RE = trial_rows(len(weight), _SCALES)
    trial = _Trial(block, experts, rules, drawn_RE, dtype)
    seen = trial.seen(weight)
    if seen is None:
        return None
    choice_RC, weights_RC, is_pair = seen
    logits_RE = (drawn_RE if bias is None else drawn_RE + bias).numpy()
    for is_normalised in (True, False):
        found = routed(
            logits_RE, choice_RC.shape[1], is_normalised=is_normalised, is_rounded=False
        )  # fmt: skip
        if _is_same(choice_RC, weights_RC, *map(torch.from_numpy, found)):
            router = rules.products[id(weight)]
            if bias is not None or not isinstance(router, RowProducts):
                router = router_product(weight, bias)
            return Mixture(
                block.forward, experts, experts.gate, router, choice_RC.shape[1],
                is_normalised, is_pair, weights_RC.dtype,
            )  # fmt: skip
    return None


def router_product(weight: Tensor, bias: Tensor | None) -> RowProducts:
    """Return the product of rows and a router's weight, in float32."""
    return RowProducts(own_panels(weight.detach().float(), bias), weight.shape[1], FLOAT32)


def _bias_beside(block: nn.Module, weight: Tensor) -> Tensor | None:
    """Return the bias of the module that has a weight, in float32."""
    for module in block.modules():
        if getattr(module, "weight", None) is weight:
            bias = getattr(module, "bias", None)
            return bias.detach().float() if isinstance(bias, Tensor) else None
    return None


def _is_same(choice_RC: Tensor, weights_RC: Tensor, found_RC: Tensor, other_RC: Tensor) -> bool:
    """Return whether both have the same experts with equal weights, in any order.

    `other_RC` is not rounded.
    """
    choice_RC, order_RC = choice_RC.long().sort(-1)
    found_RC, other_order_RC = found_RC.sort(-1)
    expected_RC = weights_RC.gather(-1, order_RC)
    same_RC = other_RC.gather(-1, other_order_RC)
    return torch.equal(choice_RC, found_RC) and torch.allclose(
        same_RC, expected_RC.float(), rtol=_ROUNDING[weights_RC.dtype], atol=1e-9
    )


def _is_equal(found: object, expected: Tensor) -> bool:
    """Return whether a result is a tensor of the same type, shape and values."""
    return (
        isinstance(found, Tensor)
        and found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(found, expected)
    )


class _Trial:
    """A run of a block's own code with prescribed logits and experts that note their inputs."""

    def __init__(
        self, block: Any, experts: PackedExperts, rules: Rules, logits_RE: Tensor,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._block, self._experts, self._rules = block, experts, rules
        self._logits_RE = logits_RE
        num_rows = len(logits_RE)
        self._x_RK = trial_rows(rules.weights[0].shape[1], [1.0] * num_rows).to(dtype)
        self._out_RN = trial_rows(experts.num_outputs, [2.0] * num_rows).to(dtype)
        self._calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def seen(self, weight: Tensor) -> tuple[Tensor, Tensor, bool] | None:
        """Return choices, weights, and whether the block returns these, too; None if unknown."""
        with self._prescribed(weight):
            try:
                result = self._block.forward(self._x_RK[None])
            except Exception:  # noqa: BLE001  # code of a checkpoint raises any type
                return None
        if len(self._calls) != 1:
            return None
        x, choice_RC, weights_RC = self._calls[0]
        is_pair = isinstance(result, tuple) and len(result) == 2
        out, *others = result if is_pair else (result,)
        is_known = (
            self._is_routing(choice_RC, weights_RC)
            and (_is_equal(x, self._x_RK) or _is_equal(x, self._x_RK[None]))
            and _is_equal(out, self._out_RN[None])
            and all(_is_equal(each, weights_RC) for each in others)
        )
        return (choice_RC, weights_RC, is_pair) if is_known else None

    def _is_routing(self, choice_RC: object, weights_RC: object) -> bool:
        """Return whether these are numbers of experts and a weight for each, row by row."""
        return (
            isinstance(choice_RC, Tensor)
            and isinstance(weights_RC, Tensor)
            and choice_RC.dtype in _INTEGERS
            and weights_RC.dtype in _ROUNDING
            and choice_RC.shape == weights_RC.shape
            and choice_RC.dim() == 2
            and len(choice_RC) == len(self._x_RK)
            and 0 < choice_RC.shape[1] <= self._experts.num_experts
        )

    def _run_experts(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self._calls.append((x, top_k_index, top_k_weights))
        return self._out_RN.view(*x.shape[:-1], -1)

    @contextmanager
    def _prescribed(self, weight: Tensor) -> Iterator[None]:
        """Let the router and the experts return what was drawn within the block."""
        products = self._rules.products
        own = products[id(weight)]
        products[id(weight)] = lambda _: self._logits_RE
        self._experts.forward = self._run_experts  # type: ignore[method-assign]
        try:
            yield
        finally:
            products[id(weight)] = own
            del self._experts.forward
