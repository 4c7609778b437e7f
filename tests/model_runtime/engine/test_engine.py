"""Requests end for the right reason, and give everything back."""

import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.errors import (
    CacheCapacityError,
    EngineStoppedError,
    QueueFullError,
    RequestError,
)
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.request import FinishReason, Output, Request
from ropewalk.rope import Tier
from tests.doubles.engines import EngineFactory, Result, answer, deployment_of, request
from tests.doubles.scripted_model import Script

VOCABULARY = 199


def served(
    engines: EngineFactory, checkpoint: Checkpoint, text: str, eos: str = "", **sampling: Any
) -> Result:
    """The answer to one request when the model says `text`."""
    ids = frozenset(checkpoint.tokenizer.encode(eos))
    engine = engines.over(checkpoint, runner=Script(checkpoint, text), eos=ids)
    return answer(engine, request(deployment_of(checkpoint), [1], **sampling))[0]


def test_an_answer_ends_at_max_tokens(engines: EngineFactory, llama_checkpoint: Checkpoint) -> None:
    """An answer of max_tokens tokens has the finish reason length."""
    result = served(engines, llama_checkpoint, "hello world", max_tokens=5)
    assert (result.text, result.finish_reason) == ("hello", FinishReason.LENGTH)


def test_an_answer_ends_before_a_stop_string(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The stop string may span tokens; its tokens were generated, so they are counted."""
    result = served(engines, llama_checkpoint, "hello world", max_tokens=50, stop=("o w", "zz"))
    assert (result.text, result.finish_reason) == ("hell", FinishReason.STOP)
    assert len(result.token_ids) == 7


def test_text_held_back_for_a_stop_string_is_sent_at_the_end(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """If max_tokens ends the answer inside a possible stop string, then no text is lost."""
    result = served(engines, llama_checkpoint, "hello world", max_tokens=6, stop=("o world",))
    assert (result.text, result.finish_reason) == ("hello ", FinishReason.LENGTH)


def test_an_end_token_ends_the_answer_and_is_no_text(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """With `ignore_eos`, the end token is text like any other."""
    result = served(engines, llama_checkpoint, "hello. more", eos=".", max_tokens=50)
    assert (result.text, result.finish_reason) == ("hello", FinishReason.STOP)
    assert len(result.token_ids) == 6
    result = served(engines, llama_checkpoint, "a.b", eos=".", max_tokens=3, ignore_eos=True)
    assert (result.text, result.finish_reason) == ("a.b", FinishReason.LENGTH)


def test_characters_arrive_whole(engines: EngineFactory, llama_checkpoint: Checkpoint) -> None:
    """A character that takes several tokens arrives in one output."""
    engine = engines.over(llama_checkpoint, runner=Script(llama_checkpoint, "né €5 🎉!"))
    outputs = engine.generate([request(deployment_of(llama_checkpoint), [1], max_tokens=14)])[0]
    assert "".join(output.text for output in outputs) == "né €5 🎉!"
    assert not any("\ufffd" in output.text for output in outputs)


def test_max_tokens_zero_scores_the_prompt_only(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The prompt logprobs have one entry per token, and the first entry is None."""
    engine = engines.over(llama_checkpoint)
    prompt = [5, 6, 7, 8, 9]
    result = answer(
        engine, request(deployment_of(llama_checkpoint), prompt, max_tokens=0, prompt_logprobs=2)
    )[0]
    assert result.token_ids == ()
    assert result.finish_reason is FinishReason.LENGTH
    assert result.prompt_logprobs[0] is None
    assert [entry.token_id for entry in result.prompt_logprobs[1:] if entry] == prompt[1:]
    single = request(deployment_of(llama_checkpoint), [5], max_tokens=0, prompt_logprobs=2)
    assert answer(engine, single)[0].prompt_logprobs == (None,)


def test_an_abort_frees_the_pages_and_says_so(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Both a running and a waiting request can be aborted."""
    script = Script(llama_checkpoint, "x")
    script.delay_s = 0.01
    engine = engines.over(llama_checkpoint, runner=script, max_num_seqs=1)
    outputs: list[queue.SimpleQueue[Output]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    deployment = deployment_of(llama_checkpoint, rope_scaling={"rope_type": "yarn", "factor": 16.0})
    running, waiting = (request(deployment, [1], max_tokens=1000) for _ in range(2))
    engine.submit(running, outputs[0].put)
    engine.submit(waiting, outputs[1].put)
    assert outputs[0].get(timeout=10).text == "x"
    engine.abort(waiting.request_id)
    assert outputs[1].get(timeout=10).finish_reason is FinishReason.ABORT
    engine.abort(running.request_id)
    while (output := outputs[0].get(timeout=10)).finish_reason is None:
        assert output.text == "x"
    assert output.finish_reason is FinishReason.ABORT
    assert engine._core.scheduler.pool.num_used == 0
    engine.abort(running.request_id)  # harmless


def test_a_step_that_fails_fails_its_requests_not_the_engine(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """A failed step ends its requests with an error, and the next request is served."""
    script = Script(llama_checkpoint, "hello")
    script.fail_at = 3
    engine = engines.over(llama_checkpoint, runner=script)
    deployment = deployment_of(llama_checkpoint)
    outputs = engine.generate([request(deployment, [1], max_tokens=5) for _ in range(2)])
    for each in outputs:
        assert each[-1].finish_reason is FinishReason.ERROR
        assert each[-1].error == "RuntimeError in a step of the engine"
    assert answer(engine, request(deployment, [1], max_tokens=5))[0].text == "hello"


def test_nan_logits_end_their_request_only(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The pages of the failed request leave the prefix index, and its neighbour is answered."""

    class Poisoned(Script):
        """A script with NaN logits for prompts that begin with token 9."""

        def run(self, spans: Sequence[Span]) -> Tensor:
            logits = super().run(spans)
            row = 0
            for span in spans:
                if span.pages[0] == self.poisoned_page:
                    logits[row : row + len(span.logit_rows)] = torch.nan
                row += len(span.logit_rows)
            return logits

        poisoned_page = 0

    class Counting(Observer):
        """An observer of the requests that end because of NaN."""

        def nan_aborted(self, request: Request) -> None:
            aborted.append(request.request_id)

    aborted: list[str] = []
    script = Poisoned(llama_checkpoint, "hello")
    engine = engines.over(
        llama_checkpoint, runner=script, observer=Counting(), max_num_batched_tokens=32
    )
    index = engine._core.scheduler.pages.index
    seen = []
    script.before_run = lambda: seen.append(len(index.published()))
    deployment = deployment_of(llama_checkpoint)
    ill = request(deployment, [9] * 60, max_tokens=5, temperature=0.7)
    well = request(deployment, [1], max_tokens=5)
    outputs = engine.generate([ill, well])
    assert outputs[0][-1].finish_reason is FinishReason.ERROR
    assert outputs[0][-1].error == "the model answered with NaN or Inf"
    assert aborted == [ill.request_id]
    assert Result.of(outputs[1]).text == "hello"
    assert max(seen) > 0, "nothing was published, so nothing had to be taken back"
    assert index.published() == {}


def test_a_listener_that_fails_stops_no_other_request(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The engine keeps running if a listener raises, and the next request is answered."""

    def fails(_: Output) -> None:
        raise RuntimeError("event loop is closed")

    engine = engines.over(llama_checkpoint, runner=Script(llama_checkpoint, "hello"))
    deployment = deployment_of(llama_checkpoint)
    engine.submit(request(deployment, [1], max_tokens=3), fails)
    assert answer(engine, request(deployment, [1], max_tokens=5))[0].text == "hello"
    assert engine.is_running


def test_an_engine_that_dies_says_so(engines: EngineFactory, llama_checkpoint: Checkpoint) -> None:
    """Clients of a dead engine get an error, and the callback given to `start` is called."""
    engine = Engine(
        Script(llama_checkpoint, "x"),
        llama_checkpoint.tokenizer,
        EngineConfig(kv_cache_tokens=64, max_model_len=64),
    )
    died = threading.Event()
    engine.start(died.set)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine._core.scheduler.schedule = None  # type: ignore[assignment, method-assign]
    engine.submit(request(deployment_of(llama_checkpoint), [1], max_tokens=3), outputs.put)
    assert outputs.get(timeout=10).finish_reason is FinishReason.ERROR
    assert died.wait(10)
    assert not engine.is_running


def test_a_request_that_can_never_be_served_is_refused_at_once(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """A request that the cache could never hold is refused with the limit in the message."""
    engine = engines.over(llama_checkpoint, kv_cache_tokens=100)
    deployment = deployment_of(llama_checkpoint)
    with pytest.raises(CacheCapacityError, match="needs 97 positions, the KV cache has 96 "):
        engine.submit(request(deployment, [1] * 97, max_tokens=1), print)
    with pytest.raises(RequestError, match="at least one token"):
        engine.submit(request(deployment, [], max_tokens=1), print)
    fits = request(deployment, [1] * 96, max_tokens=1)
    assert len(answer(engine, fits)[0].token_ids) == 1


def test_a_full_queue_refuses(engines: EngineFactory, llama_checkpoint: Checkpoint) -> None:
    """The queue's limit also holds for a burst between two steps."""
    script = Script(llama_checkpoint, "x")
    gate = threading.Event()
    script.before_run = lambda: None if gate.wait(60) else pytest.fail("never opened")
    engine = engines.over(llama_checkpoint, runner=script, max_queued_requests=2, max_num_seqs=1)
    deployment = deployment_of(llama_checkpoint)

    def submit_all() -> None:
        for _ in range(8):
            engine.submit(request(deployment, [1], max_tokens=2), accepted.append)

    accepted: list[Output] = []
    with pytest.raises(QueueFullError, match="2 requests are waiting; at most 2 may"):
        submit_all()
    gate.set()


def test_a_group_is_accepted_whole_or_not_at_all(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """A group that can never fit gets another error than one that finds the queue full."""
    script = Script(llama_checkpoint, "hello")
    engine = engines.over(llama_checkpoint, runner=script, max_num_seqs=2, max_queued_requests=3)
    deployment = deployment_of(llama_checkpoint)

    def group(size: int) -> list[Request]:
        return [request(deployment, [1], max_tokens=5) for _ in range(size)]

    assert [result.text for result in answer(engine, *group(5))] == ["hello"] * 5
    with pytest.raises(RequestError, match=r"wants 6 answers .* at most 5 at once"):
        engine.generate(group(6))
    assert script.num_calls < 20
    script.delay_s = 0.1
    first: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request(deployment, [1], max_tokens=50), first.put)
    first.get(timeout=10)
    with pytest.raises(QueueFullError):
        engine.generate(group(5))


def test_a_request_that_can_start_at_once_does_not_wait(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """Requests that can start at once are served even if the queue has no places."""
    engine = engines.over(
        llama_checkpoint, runner=Script(llama_checkpoint, "hello"), max_queued_requests=0
    )
    deployment = deployment_of(llama_checkpoint)
    eight = [request(deployment, [1], max_tokens=5) for _ in range(8)]
    assert [result.text for result in answer(engine, *eight)] == ["hello"] * 8


def test_stopping_ends_everything_with_an_error(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """A stopped engine ends all requests with an error and accepts no more."""
    script = Script(llama_checkpoint, "x")
    script.delay_s = 0.01
    engine = engines.over(llama_checkpoint, runner=script)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine.submit(request(deployment_of(llama_checkpoint), [1], max_tokens=60), outputs.put)
    outputs.get(timeout=10)
    engine.stop()
    assert not engine.is_running
    last = [outputs.get() for _ in range(outputs.qsize())][-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the engine stopped")
    with pytest.raises(EngineStoppedError):
        engine.submit(request(deployment_of(llama_checkpoint), [1]), outputs.put)


class Recorder(Observer):
    """An observer that records all events."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def started(self, request: Request, num_cached_tokens: int, queue_seconds: float) -> None:
        """Record that a request left the queue."""
        self.heard.append(("started", queue_seconds))

    def first_token(self, request: Request, seconds: float, prefill_seconds: float) -> None:
        """Record the first token."""
        self.heard.append(("first", (seconds, prefill_seconds)))

    def next_token(self, request: Request, context_len: int, seconds: float) -> None:
        """Record a further token."""
        self.heard.append(("next", (context_len, seconds)))

    def finished(
        self, request: Request, tier: Tier, reason: FinishReason, num_generated: int, seconds: float
    ) -> None:
        """Record the end."""
        self.heard.append(("finished", (reason, num_generated, seconds)))


def test_the_observer_hears_every_token_once(
    engines: EngineFactory, llama_checkpoint: Checkpoint
) -> None:
    """The observer's events come in order, and their times add up."""
    recorder = Recorder()
    script = Script(llama_checkpoint, "abc")
    script.delay_s = 0.02
    engine = engines.over(llama_checkpoint, runner=script, observer=recorder)
    answer(engine, request(deployment_of(llama_checkpoint), [1], max_tokens=4))
    assert [name for name, _ in recorder.heard] == [
        *["started", "first", "next", "next", "next", "finished"]
    ]
    values = [value for _, value in recorder.heard]
    assert [value[0] for value in values[2:5]] == [3, 4, 5]
    assert all(0.015 < value[1] < 1 for value in values[2:5])
    assert values[5][:2] == (FinishReason.LENGTH, 4)
    assert values[5][2] >= values[1][0] + sum(value[1] for value in values[2:5]) - 1e-3
