"""Choose the tokens of a step, so that no request's values fail the rows of others.

Rows are sampled together. If that fails, each is sampled alone, which gives the same tokens, and
only the rows that fail again have none.

Shapes: R = rows of logits, V = vocabulary.
"""

from collections.abc import Sequence
from copy import copy

import structlog
from torch import Tensor

from ropewalk.model_runtime.engine.request_state import RequestState
from ropewalk.model_runtime.engine.runner import StepMemoryError, memory_errors_told
from ropewalk.model_runtime.runner.sampler import sample_rows

NO_TOKEN = -1  # of a row that cannot be sampled

_log = structlog.get_logger(__name__)


def choose_tokens(
    logits_RV: Tensor,
    places: Sequence[int],
    states: Sequence[RequestState],
    depths: Sequence[int] | None = None,
) -> tuple[list[bool], list[int]]:
    """Return whether each row of the logits is finite, and a token or NO_TOKEN for each place.

    `places`: the row of each state. `depths`: the tokens of a draft before that row; None: none.
    Raises StepMemoryError.
    """
    try:
        with memory_errors_told():
            if depths is None:
                rows = [state.sampling_row() for state in states]
            else:  # a state keeps one row, and may have several places
                asked = zip(states, depths, strict=True)
                rows = [copy(state.sampling_row(depth)) for state, depth in asked]
            return sample_rows(logits_RV, places, rows)
    except StepMemoryError:
        raise
    except Exception:  # noqa: BLE001  # the rows that fail are logged
        return _choose_apart(logits_RV, places, states, depths or [0] * len(places))


def _choose_apart(
    logits_RV: Tensor,
    places: Sequence[int],
    states: Sequence[RequestState],
    depths: Sequence[int],
) -> tuple[list[bool], list[int]]:
    with memory_errors_told():
        is_finite_R, _ = sample_rows(logits_RV, (), ())  # raises if the device is broken
    asked = zip(places, states, depths, strict=True)
    return is_finite_R, [
        _alone(logits_RV[place : place + 1], state, depth) for place, state, depth in asked
    ]


def _alone(logits_1V: Tensor, state: RequestState, depth: int) -> int:
    try:
        with memory_errors_told():
            _, (token_id,) = sample_rows(logits_1V, (0,), (state.sampling_row(depth),))
    except StepMemoryError:
        raise
    except Exception:  # noqa: BLE001  # whatever a request's values may raise
        _log.exception("sampling_failed", request_id=state.sequence.request.request_id)
        return NO_TOKEN
    return token_id
