"""Limits of the queue, counted without a scheduler."""

import pytest

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.admission import AdmissionQueue
from ropewalk.model_runtime.errors import EngineStoppedError, QueueFullError, RequestError


def opened(**limits: int) -> AdmissionQueue:
    """Return an open queue: two requests run, and one may wait."""
    sizes = {"max_num_seqs": 2, "max_queued_requests": 1, **limits}
    admission = AdmissionQueue(EngineConfig(kv_cache_tokens=64, max_model_len=64, **sizes))
    admission.open()
    return admission


def submit(admission: AdmissionQueue, num_tokens: int = 1) -> None:
    """Submit one request."""
    admission.submit(1, num_tokens, None, lambda: None)


def test_reserved_and_submitted_requests_count_until_they_end() -> None:
    """An unused reservation is given back at the end of its block."""
    admission = opened()
    with admission.reserve(2):
        submit(admission)
        with pytest.raises(QueueFullError, match="1 requests are waiting; at most 1 may"):
            submit(admission)
    submit(admission)
    submit(admission)
    with pytest.raises(QueueFullError):
        submit(admission)
    admission.ended()
    submit(admission)


def test_a_reservation_is_filled_and_not_counted_twice() -> None:
    """The places are taken by the submission inside the block."""
    admission = opened()
    with admission.reserve(3) as places:
        admission.submit(3, 3, places, lambda: None)
    with pytest.raises(QueueFullError):
        submit(admission)


def test_waiting_prompt_tokens_have_a_limit() -> None:
    """An empty queue accepts a prompt of any length."""
    admission = opened(max_queued_prompt_tokens=10)
    submit(admission, 50)
    admission.note_waiting(6)
    submit(admission, 4)
    with pytest.raises(QueueFullError, match="6 prompt tokens are waiting; with these 5"):
        submit(admission, 5)
    admission.note_waiting(0)
    submit(admission, 50)


def test_more_answers_than_ever_fit_are_refused_by_name() -> None:
    """Waiting would not help, so the code is not that of a full queue."""
    with pytest.raises(RequestError, match="wants 4 answers") as caught, opened().reserve(4):
        pass
    assert caught.value.code == "too_many_answers"


def test_nothing_is_queued_after_the_end() -> None:
    """The callback runs under the lock, and not for a refused request."""
    admission = opened()
    admission.close()
    queued: list[int] = []
    with pytest.raises(EngineStoppedError):
        admission.submit(1, 1, None, lambda: queued.append(1))
    assert not queued
