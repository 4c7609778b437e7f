"""The choice of experts from a router's logits, and their weights, row by row.

A row's experts are those with the largest logits. Among equal ones, the lower number is chosen. The
weights are a softmax over the chosen experts, or over all of them. Blocks such as Granite's round
them to bfloat16.

Shapes: R = rows, E = experts, C = choices of a row, T = terms of a softmax.
"""

import numpy as np

from ropewalk.model_runtime.cpu_kernels.attention.kernel_arguments import Floats
from ropewalk.model_runtime.cpu_kernels.elementwise import narrow, widen
from ropewalk.model_runtime.cpu_kernels.experts.products import Integers
from ropewalk.model_runtime.cpu_kernels.jit import jit
from ropewalk.model_runtime.cpu_kernels.simd import WIDTH, exp, load, store

_NAN = np.float32(np.nan)


@jit()
def _choose(logits_E: Floats, choice_C: Integers, best_C: Floats) -> bool:
    """Write the chosen experts and their logits, the largest first; return whether any is NaN."""
    num_choices, has_nan = choice_C.shape[0], False
    for expert in range(logits_E.shape[0]):
        logit = logits_E[expert]
        has_nan |= np.isnan(logit)
        at = min(expert, num_choices)
        if at == num_choices:
            if not logit > best_C[at - 1]:
                continue
            at -= 1
        while at > 0 and logit > best_C[at - 1]:
            best_C[at], choice_C[at] = best_C[at - 1], choice_C[at - 1]
            at -= 1
        best_C[at], choice_C[at] = logit, expert
    return has_nan


@jit(apart=True)
def route(
    logits_RE: Floats, is_normalised: int, is_rounded: int, choice_RC: Integers, weights_RC: Floats
) -> None:  # fmt: skip
    """Write the experts of each row and their weights; NaN in a row makes its weights NaN.

    `is_normalised`: the weights of a row add up to one. `is_rounded`: they are bfloat16 values.
    """
    num_experts, num_choices = logits_RE.shape[1], choice_RC.shape[1]
    num_terms = num_choices if is_normalised else num_experts
    best_C, bits_C = np.empty(num_choices, np.float32), np.empty(num_choices, np.uint16)
    terms_T = np.zeros((num_terms + WIDTH - 1) // WIDTH * WIDTH, np.float32)
    for r in range(logits_RE.shape[0]):
        has_nan = _choose(logits_RE[r], choice_RC[r], best_C)
        for t in range(num_terms):
            logit = best_C[t] if is_normalised else logits_RE[r, t]
            terms_T[t] = logit - best_C[0]
        for t in range(0, num_terms, WIDTH):
            store(terms_T, t, exp(load(terms_T, t)))
        total = np.float32(0.0)
        for t in range(num_terms):
            total += terms_T[t]
        for c in range(num_choices):
            term = terms_T[c if is_normalised else choice_RC[r, c]]
            weights_RC[r, c] = _NAN if has_nan else term / total
        if is_rounded:
            narrow(weights_RC[r], bits_C)
            widen(bits_C, weights_RC[r])
        terms_T[num_terms:] = np.float32(0.0)


def routed(
    logits_RE: Floats, num_choices: int, *, is_normalised: bool, is_rounded: bool
) -> tuple[Integers, Floats]:  # fmt: skip
    """Return the experts of each row and their weights, [R, C] each."""
    choice_RC = np.empty((len(logits_RE), num_choices), np.int64)
    weights_RC = np.empty(choice_RC.shape, np.float32)
    route(logits_RE, int(is_normalised), int(is_rounded), choice_RC, weights_RC)
    return choice_RC, weights_RC
