"""The events of a stream, byte by byte, against whole bodies of pydantic."""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.engine.admission import Places
from ropewalk.model_runtime.request import (
    FinishReason,
    OnOutput,
    Output,
    PromptProgress,
    Request,
    SamplingParams,
    TokenLogprob,
)
from ropewalk.rope.native import native_rope
from ropewalk.server.api.completion_schema import CompletionRequest
from ropewalk.server.api.completions import _CompletionAnswer
from ropewalk.server.api.generation_response import ChunkAnswer, HttpAnswer
from ropewalk.server.api.output_queue import (
    DONE,
    KEEP_ALIVE,
    OPENING,
    OutputQueue,
    Submission,
    event,
)
from ropewalk.server.turns.chat import _ChatAnswer
from ropewalk.server.turns.chat_schema import ChatRequest
from ropewalk.server.turns.chat_turn import ChatTurn
from tests.doubles.tokens import byte_tokenizer
from tests.doubles.virtual_time import run_at_once

PLAIN = {"turn": ChatTurn(messages=[]), "plan": None}  # an answer that is text
ROUTES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chat": (
        partial(_ChatAnswer, **PLAIN),
        ChatRequest,
        {"messages": [{"role": "user", "content": "a"}]},
    ),
    "completions": (_CompletionAnswer, CompletionRequest, {"prompt": "ab"}),
}
NATIVE = native_rope({"max_position_embeddings": 64, "head_dim": 16})
DEPLOYMENT = make_deployment(
    "tiny", NATIVE, DeploymentOptions(rope_policy="grow", max_rope_factor=4.0)
)
PROMPT_IDS = tuple(byte_tokenizer().encode("ab"))
PLACEMENT = DEPLOYMENT.choose(RopeRequest(), 2, 100)
TIERS = (PLACEMENT.tier, *PLACEMENT.higher_tiers)
TEXTS = ("a", "", '"\\/', "\x00\x08\t\n\x0c\r\x1f\x7f\x80", "é\u2028\ufeff\uffff", "𝄞", "</s>")
LOGPROB = TokenLogprob(97, -0.5, ((97, -0.5), (98, float("-inf"))))


class Outputs:
    """An engine of which the test gives the outputs, on the loop's own thread."""

    def __init__(self, queue: OutputQueue) -> None:
        self.aborted: list[str] = []
        self._queue = queue
        self._callbacks: list[OnOutput] = []

    def submit_all(self, requests: Sequence[tuple[Request, OnOutput]], *_: Any) -> None:
        """Keep the callbacks."""
        self._callbacks = [callback for _, callback in requests]

    def abort(self, request_id: str) -> None:
        """Keep the id."""
        self.aborted.append(request_id)

    def give(self, *outputs: tuple[int, Output]) -> None:
        """Give the outputs of one step."""
        for index, output in outputs:
            self._callbacks[index](output)
        self._queue.flush()


def submitted(
    num: int = 1, *, keep_alive_s: float = 0.0, interval: int = 1
) -> tuple[Any, Submission, Outputs]:
    """A service, requests of it, and the engine behind them. Needs a running loop."""
    queue = OutputQueue()
    engine = Outputs(queue)
    requests = [
        Request(f"id-{number}", PROMPT_IDS, SamplingParams(), PLACEMENT) for number in range(num)
    ]
    settings = SimpleNamespace(sse_keep_alive_seconds=keep_alive_s)
    parts = {"settings": settings, "tokenizer": byte_tokenizer(), "max_new_tokens": None}
    submission = Submission(
        engine,  # type: ignore[arg-type]  # as much of it as a submission uses
        queue,
        requests,
        0.0,
        Places(num),
        max_unread=1000,
        stream_interval=interval,
    )
    return SimpleNamespace(**parts, has_same_bits=True), submission, engine


def answer_of(
    route: str, *, keep_alive_s: float = 0.0, interval: int = 1, **fields: Any
) -> tuple[ChunkAnswer[Any], Outputs]:
    """An answer to a streamed request, and the engine behind it. Needs a running loop."""
    answer_type, body_type, prompt = ROUTES[route]
    body = body_type(**{**prompt, "stream": True, **fields})
    service, submission, engine = submitted(
        body.n or 1, keep_alive_s=keep_alive_s, interval=interval
    )
    answer = answer_type(service, submission, body)
    answer.created = 7
    return answer, engine


async def sent_by(
    answer: HttpAnswer[Any], engine: Outputs, steps: Sequence[Sequence[tuple[int, Output]]]
) -> list[bytes]:
    """The bytes of the stream if each step is given when the one before has been sent."""
    sent, left = [], list(steps)
    async for piece in answer.events():
        sent.append(piece)
        if left:
            engine.give(*left.pop(0))
    answer.close()
    return sent


def whole_bodies(answer: ChunkAnswer[Any], outputs: Sequence[tuple[int, Output]]) -> bytes:
    """The events of the outputs, each built as a whole body."""
    return b"".join(event(answer.event_body([answer.piece(*each)])) for each in outputs)


def tokens(index: int = 0, *, num_rescales: int = 0, **fields: Any) -> list[tuple[int, Output]]:
    """An output for each text."""
    return [
        (
            index,
            Output(
                text=text,
                token_ids=(97,),
                tier=TIERS[num_rescales],
                num_rescales=num_rescales,
                **fields,
            ),
        )
        for text in TEXTS
    ]


def end(index: int = 0, reason: FinishReason = FinishReason.LENGTH) -> tuple[int, Output]:
    """The last output of a choice."""
    return index, Output(
        text="z", token_ids=(97,), finish_reason=reason, tier=TIERS[1], num_rescales=1
    )


PLANES = [
    "".join(chr(at) for at in range(first, first + 65536) if not 0xD800 <= at < 0xE000)
    for first in range(0, 0x110000, 65536)
]
WITH_LOGPROBS = {
    "chat": {"logprobs": True, "top_logprobs": 2},
    "completions": {"logprobs": 2, "echo": True},
}
SHAPES: dict[str, tuple[dict[str, Any], list[tuple[int, Output]]]] = {
    "plain": ({}, [*tokens(), end()]),
    "rescaled": ({}, [*tokens(), *tokens(num_rescales=1), *tokens(), end()]),
    "two choices": (
        {"n": 2},
        [*tokens(0), *tokens(1), *tokens(1, num_rescales=1), *tokens(0), end(1), end(0)],
    ),
    "one token": ({}, [end(reason=FinishReason.STOP)]),
    "all of Unicode": ({}, [*((0, Output(text=each, tier=TIERS[0])) for each in PLANES), end()]),
    "logprobs": ({}, [*tokens(logprobs=(LOGPROB,)), end()]),  # offsets change with every token
}


@pytest.mark.parametrize("together", [1, 5, 100])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("route", ROUTES)
def test_events_are_the_bytes_of_whole_bodies(route: str, shape: str, together: int) -> None:
    """Whatever is sent together, each output is an event of its own, in order."""
    fields, outputs = SHAPES[shape]
    if shape == "logprobs":
        fields = {**WITH_LOGPROBS[route], "stream_options": {"include_usage": True}}
    steps = [outputs[first : first + together] for first in range(0, len(outputs), together)]

    async def check() -> None:
        answer, engine = answer_of(route, **fields)
        sent = await sent_by(answer, engine, steps)
        expected = whole_bodies(answer_of(route, **fields)[0], outputs)
        if shape == "logprobs":
            expected += event(answer.event_body([], usage=answer.usage()))
            assert b'"completion_tokens":8' in expected
            assert expected.count(b'"text":"ab') == (route == "completions"), "one echo"
        assert b"".join(sent) == OPENING + expected + DONE
        assert len(sent) <= len(steps) + 2 + len(outputs) // 32

    asyncio.run(check())


def test_progress_between_events_changes_none() -> None:
    """Progress has no choice."""
    progress = Output(progress=PromptProgress(2, 0, 2, 0.5))
    outputs = [*tokens(), end()]

    async def check() -> None:
        steps = [[(0, progress)], outputs]
        sent = await sent_by(*answer_of("completions", return_progress=True), steps)
        told = [piece for piece in sent if b"prompt_progress" in piece]
        assert len(told) == 1
        rest = b"".join(piece for piece in sent if piece not in told)
        assert rest == OPENING + whole_bodies(answer_of("completions")[0], outputs) + DONE

    asyncio.run(check())


def test_progress_tells_the_prompt_of_its_choice() -> None:
    progress = Output(progress=PromptProgress(2, 0, 2, 0.5))

    async def check() -> None:
        answer, _ = answer_of("completions", prompt=["ab", "cd"], n=2, return_progress=True)
        events = [await answer.output_events(index, progress) for index in range(4)]
        told = [json.loads(each.removeprefix(b"data: "))["prompt_progress"] for each in events]
        assert [each["index"] for each in told] == [0, 0, 1, 1]

    asyncio.run(check())


def test_an_error_comes_after_the_tokens_before_it() -> None:
    """It ends the stream for all choices, and aborts those that go on."""
    failed = (0, Output(finish_reason=FinishReason.ERROR, error="out of chalk"))
    outputs = tokens()

    async def check() -> None:
        answer, engine = answer_of("completions", n=2)
        sent = b"".join(await sent_by(answer, engine, [[*outputs, failed, *tokens(1)]]))
        before = OPENING + whole_bodies(answer_of("completions")[0], outputs)
        assert sent.startswith(before)
        assert sent.endswith(DONE)
        rest = sent.removeprefix(before).removesuffix(DONE)
        assert rest.count(b"data: ") == 1
        assert b"out of chalk" in rest
        assert engine.aborted == ["id-1"]

    asyncio.run(check())


def at(times: Sequence[float], act: Callable[[], None]) -> None:
    """Act at these times from now, in seconds."""
    for time_s in times:
        asyncio.get_running_loop().call_later(time_s, act)


def test_comments_are_sent_in_silence_only() -> None:
    """One timer of the stream is pushed forward by every token."""
    text = (0, Output(text="a", tier=TIERS[0]))

    async def check() -> None:
        answer, engine = answer_of("completions", keep_alive_s=0.2)
        at([0.05 * number for number in range(1, 12)], lambda: engine.give(text))
        at([1.3], lambda: engine.give(end()))
        loop = asyncio.get_running_loop()
        sent = [(loop.time(), piece) async for piece in answer.events()]
        answer.close()
        comments = [number for number, (_, piece) in enumerate(sent) if piece == KEEP_ALIVE]
        assert comments
        last_text = comments[0] - 1
        assert last_text == 11, "no comment between tokens"
        assert comments == list(range(comments[0], len(sent) - 2))
        silences = [sent[each][0] - sent[each - 1][0] for each in comments]
        assert silences == pytest.approx([0.2] * len(comments))

    run_at_once(check())


def test_outputs_without_an_event_are_silence() -> None:
    """Nothing is sent for each of them, and a comment once the client has waited long enough."""
    held = (0, Output(text="a", tier=TIERS[0]))

    async def check(keep_alive_s: float) -> list[bytes]:
        answer, engine = answer_of("chat", keep_alive_s=keep_alive_s)
        answer.listener = lambda index, output: None
        answer.pieces = lambda index, output: []  # type: ignore[method-assign]
        at([0.02 * number for number in range(1, 26)], lambda: engine.give(held))
        at([0.55], lambda: engine.give(end()))
        sent = [piece async for piece in answer.events()]
        answer.close()
        return sent

    assert asyncio.run(check(0.0)) == [OPENING, DONE]
    sent = asyncio.run(check(0.2))
    assert sent[0] == OPENING
    assert 1 <= sent.count(KEEP_ALIVE) <= 3
    assert b"" not in sent


def test_a_closed_answer_aborts_and_leaves_no_timer() -> None:
    """A client that is gone must not keep the loop busy."""

    async def check() -> None:
        answer, engine = answer_of("completions", n=2, keep_alive_s=0.05)
        events = answer.events()
        assert await anext(events) == OPENING
        assert await anext(events) == KEEP_ALIVE
        await events.aclose()
        answer.close()
        assert engine.aborted == ["id-0", "id-1"]
        await asyncio.sleep(0.1)
        timers = [each for each in asyncio.get_running_loop()._scheduled if not each.cancelled()]
        assert not timers

    run_at_once(check())
