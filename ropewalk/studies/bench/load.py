"""Sends the requests of a plan and measures their streams on the client's side."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from ropewalk.studies.bench.plan import Group, LoadPlan
from ropewalk.studies.bench.target import Prompt, PromptMaker, Target

_MAX_MESSAGE = 300  # characters of an error's text that are kept
_OVER = b"[DONE]"


class _TokenDetails(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _TokenDetails | None = None


class _Choice(BaseModel):
    text: str = ""


class _Error(BaseModel):
    message: str = ""
    type: str | None = None
    code: str | int | None = None

    def word(self) -> str:
        """Return the code, or the type if there is none; vLLM's code only repeats the status."""
        return self.code if isinstance(self.code, str) else self.type or "error"


class _Event(BaseModel):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _ErrorBody(BaseModel):
    error: _Error


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a request. `kind` is one of few: a status and code, or a transport's."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Measurements of an answered request, in seconds since it was sent."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # of the prompt, found in the prefix cache; None: not reported
    token_times_s: tuple[float, ...]  # of each event that carried a generated token
    end_to_end_s: float

    @property
    def time_to_first_token_s(self) -> float:
        """Return the time from sending to the first event with a token."""
        return self.token_times_s[0]

    @property
    def inter_token_s(self) -> tuple[float, ...]:
        """Return the gaps between successive events with tokens."""
        pairs = itertools.pairwise(self.token_times_s)
        return tuple(late - early for early, late in pairs)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that was sent."""

    group: Group
    started_s: float  # since the run began
    outcome: Timing | Failure


class _FailedError(Exception):
    """An error that ends the measurement of one request."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message[:_MAX_MESSAGE])


def open_client(
    api_key: str | None, concurrency: int, timeout_s: float, *, keeps_connections: bool = True
) -> httpx.AsyncClient:
    """Return a client with a connection per in-flight request. Close it at the end.

    `keeps_connections` is False if the server closes a connection after its answer.
    """
    limits = httpx.Limits(
        max_connections=concurrency,
        max_keepalive_connections=concurrency if keeps_connections else 0,
        keepalive_expiry=2,  # below uvicorn's 5, to avoid a connection it has just closed
    )
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(limits=limits, headers=headers, timeout=timeout_s)


async def run_load(
    client: httpx.AsyncClient,
    target: Target,
    make_prompt: PromptMaker,
    plan: LoadPlan,
    on_group: Callable[[Group, list[RequestRecord]], None],
) -> list[RequestRecord]:
    """Send all groups one after the other, and call `on_group` after each."""
    began = time.perf_counter()
    records: list[RequestRecord] = []
    for group in plan.groups():
        prompts = [make_prompt(group.context_len, number) for number in group.numbers]
        bodies = [_body(target, plan, prompt) for prompt in prompts]  # before any time is measured
        since_began = time.perf_counter() - began
        outcomes = await asyncio.gather(
            *(
                measure(client, target, body, prompt, plan.timeout_s)
                for body, prompt in zip(bodies, prompts, strict=True)
            )
        )
        of_group = [RequestRecord(group, since_began, outcome) for outcome in outcomes]
        records += of_group
        on_group(group, of_group)
    return records


def _body(target: Target, plan: LoadPlan, prompt: Prompt) -> bytes:
    fields: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt.content,
        "max_tokens": plan.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.rope is not None:
        fields["rope"] = plan.rope
    return json.dumps(fields).encode()


async def measure(
    client: httpx.AsyncClient, target: Target, body: bytes, prompt: Prompt, timeout_s: float
) -> Timing | Failure:
    """Send one streamed completion, its body as JSON, and time its answer."""
    answer = _StreamedAnswer(time.perf_counter())
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(
                "POST", f"{target.url}/v1/completions", content=body, headers=headers
            ) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise _refused(response.status_code, await response.aread())
            async for chunk in response.aiter_bytes():
                answer.receive(chunk)
        return answer.timing(prompt)
    except (TimeoutError, httpx.TimeoutException):
        return Failure("timeout", f"no end of the answer within {timeout_s:g} seconds")
    except httpx.HTTPError as error:
        return Failure(f"transport {type(error).__name__}", str(error)[:_MAX_MESSAGE])
    except _FailedError as error:
        return error.failure


def _refused(status: int, body: bytes) -> _FailedError:
    try:
        error = _ErrorBody.model_validate_json(body).error
    except ValidationError:
        return _FailedError(str(status), body.decode(errors="replace"))
    return _FailedError(f"{status} {error.word()}", error.message)


@dataclass(slots=True)
class _StreamedAnswer:
    """The server-sent events of one answer, and their arrival times."""

    sent: float  # on the clock of time.perf_counter
    _rest: bytes = b""  # of an incomplete line
    _token_times_s: list[float] = field(default_factory=list)
    _last_text: str = ""
    _usage: _Usage | None = None
    _over_s: float | None = None

    def receive(self, chunk: bytes) -> None:
        """Read a chunk. Lines are split here, because httpx also splits at U+2028, valid text."""
        now_s = time.perf_counter() - self.sent
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # not a comment, not a blank line, not a name
                self._take(line.removeprefix(b"data:").strip(), now_s)

    def _take(self, data: bytes, now_s: float) -> None:
        if data == _OVER:
            self._over_s = now_s
            return
        try:
            event = _Event.model_validate_json(data)
        except ValidationError as error:
            text = data.decode(errors="replace")
            raise _FailedError("stream unreadable", text) from error
        if event.error is not None:
            raise _FailedError(f"stream {event.error.word()}", event.error.message)
        self._usage = event.usage or self._usage
        if event.choices:
            self._token_times_s.append(now_s)
            self._last_text = event.choices[0].text

    def timing(self, prompt: Prompt) -> Timing:
        """Return the timing of an ended stream. Raises _FailedError if it ended too early."""
        if self._over_s is None:
            raise _FailedError("stream cut", "the stream ended before data: [DONE]")
        times, usage = self._token_times_s, self._usage
        if usage is not None and len(times) > usage.completion_tokens and not self._last_text:
            times = times[:-1]  # some servers send finish_reason in its own event
        num_prompt = usage.prompt_tokens if usage is not None else prompt.num_tokens
        if not times or num_prompt is None:
            what = "usage" if times else "token"
            raise _FailedError(f"stream without {what}", f"no event carried a {what}")
        details = None if usage is None else usage.prompt_tokens_details
        return Timing(
            prompt_tokens=num_prompt,
            completion_tokens=len(times) if usage is None else usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
            token_times_s=tuple(times),
            end_to_end_s=self._over_s,
        )
