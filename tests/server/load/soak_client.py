"""One client of a soak: it sends requests, retries, leaves, and counts the outcomes."""

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.server.load.soak_plan import Ask, ask

_MOST_RETRIES = 200
_LIMIT_S = 120


@dataclass
class Tally:
    """The outcomes that clients saw; those that cannot be known are counted apart."""

    outcomes: Counter[str] = field(default_factory=Counter)  # one for each request of a plan
    http: Counter[tuple[str, int]] = field(default_factory=Counter)  # (path, status)
    finished: Counter[str] = field(default_factory=Counter)  # choices by finish_reason
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    prompt_tokens: int = 0  # of finished choices, a prompt once for each
    generated_tokens: int = 0
    num_left: int = 0  # choices whose end no client saw
    left_tokens: int = 0  # prompt and max_tokens of those
    left_whole: Counter[str] = field(default_factory=Counter)  # requests by path, without status
    ids: list[str] = field(default_factory=list)
    greedy: list[tuple[Ask, list[str]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the tally of another client."""
        for name in ("outcomes", "http", "finished", "rejected", "left_whole"):
            getattr(self, name).update(getattr(other, name))
        for name in ("prompt_tokens", "generated_tokens", "num_left", "left_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("ids", "greedy", "wrong"):
            getattr(self, name).extend(getattr(other, name))

    @property
    def num_asked(self) -> int:
        """The number of HTTP requests, retries included."""
        return self.http.total() + self.left_whole.total()


class SoakClient:
    """A client that sends one request after another until `over` is set."""

    def __init__(self, url: str, seed: int, number: int) -> None:
        self.tally = Tally()
        self._url = url
        self._seed = seed
        self._number = number
        self._count = 0
        self._rng = Random(f"{seed}/{number}/pauses")

    def run(self, over: threading.Event, *, may_leave: bool) -> Tally:
        """Send requests until `over` is set; returns the tally of this run."""
        self.tally = Tally()
        with httpx.Client(timeout=_LIMIT_S) as http:
            while not over.is_set():
                asked = ask(self._seed, self._number, self._count, may_leave=may_leave)
                self._count += 1
                try:
                    outcome = self._served(http, asked, over)
                except Exception as error:  # noqa: BLE001  # it is what the test reports
                    outcome = self._wrong(asked, f"{type(error).__name__}: {error}")
                self.tally.outcomes[outcome] += 1
        return self.tally

    def _served(self, http: httpx.Client, asked: Ask, over: threading.Event) -> str:
        """The one outcome of a request; after a full queue it is sent again."""
        for _ in range(_MOST_RETRIES):
            outcome = self._once(http, asked)
            if outcome != "queue_full":
                return outcome
            if over.wait(self._rng.uniform(0.05, 0.5)):
                return "gave up"
        return "gave up"

    def _once(self, http: httpx.Client, asked: Ask) -> str:
        if asked.manner.endswith("stream"):
            return self._stream(http, asked)
        limit_s = asked.leave_after_s if asked.manner == "leave whole" else _LIMIT_S
        try:
            answer = self._post(http, asked, limit_s)
        except httpx.ReadTimeout:
            if asked.manner != "leave whole":
                raise
            self.tally.left_whole[asked.path] += 1
            self._leave(asked)
            return "left"
        self.tally.http[asked.path, answer.status_code] += 1
        if answer.status_code != 200:
            return self._refused(asked, answer)
        body = answer.json()
        texts = [_text(choice) for choice in body["choices"]]
        reasons = [choice["finish_reason"] for choice in body["choices"]]
        self._finish(asked, body["id"], texts, reasons, body["usage"])
        return "answered"

    def _post(self, http: httpx.Client, asked: Ask, limit_s: float) -> httpx.Response:
        timeout = httpx.Timeout(_LIMIT_S, read=limit_s)
        return http.post(self._url + asked.path, content=asked.body, headers=_JSON, timeout=timeout)

    def _stream(self, http: httpx.Client, asked: Ask) -> str:
        url = self._url + asked.path
        with http.stream("POST", url, content=asked.body, headers=_JSON) as answer:
            self.tally.http[asked.path, answer.status_code] += 1
            if answer.status_code != 200:
                answer.read()
                return self._refused(asked, answer)
            events: list[str] = []
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                if asked.manner == "leave stream" and len(events) >= asked.leave_after_events:
                    break
        if "[DONE]" not in events and asked.manner == "leave stream":
            self._leave(asked)
            return "left"
        assert events.count("[DONE]") == 1 == len(events) - events.index("[DONE]"), events[-3:]
        self._finish_stream(asked, [json.loads(event) for event in events[:-1]])
        return "answered"

    def _finish_stream(self, asked: Ask, events: list[dict[str, Any]]) -> None:
        errors = [event for event in events if "error" in event]
        assert not errors, errors
        texts = [""] * asked.num_choices
        reasons: list[str | None] = [None] * asked.num_choices
        for choice in (choice for event in events for choice in event["choices"]):
            index = choice["index"]
            assert reasons[index] is None, "a choice went on after its end"
            texts[index] += _text(choice)
            reasons[index] = choice["finish_reason"]
        ids = {event["id"] for event in events}
        assert len(ids) == 1
        usages = [event["usage"] for event in events if event["usage"]]
        assert len(usages) == 1
        self._finish(asked, ids.pop(), texts, reasons, usages[0])

    def _finish(
        self,
        asked: Ask,
        answer_id: str,
        texts: list[str],
        reasons: list[str | None],
        usage: dict[str, Any],
    ) -> None:
        assert len(texts) == asked.num_choices
        assert set(reasons) <= {"stop", "length"}
        seen = self.tally
        seen.finished.update(str(reason) for reason in reasons)
        seen.prompt_tokens += usage["prompt_tokens"] * asked.num_choices
        seen.generated_tokens += usage["completion_tokens"]
        seen.ids.append(answer_id)
        if asked.is_greedy:
            seen.greedy.append((asked, texts))

    def _refused(self, asked: Ask, answer: httpx.Response) -> str:
        error = answer.json()["error"]
        reason = error["code"] or "invalid"
        self.tally.rejected[reason] += 1
        if reason == "queue_full":
            assert answer.status_code == 429
            assert answer.headers["Retry-After"] == "1"
            return reason
        if asked.manner == "hostile" and answer.status_code < 500:
            return "refused"
        return self._wrong(asked, f"{answer.status_code} {error['message']}")

    def _leave(self, asked: Ask) -> None:
        self.tally.num_left += asked.num_choices
        self.tally.left_tokens += asked.most_tokens

    def _wrong(self, asked: Ask, what: str) -> str:
        where = f"client {self._number}, request {self._count - 1} ({asked.manner})"
        self.tally.wrong.append(f"{where}: {what[:300]}\n    {asked.body[:200]!r}")
        time.sleep(0.1)  # a server that is gone must not be asked a million times
        return "wrong"


_JSON = {"Content-Type": "application/json"}


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice of any shape."""
    inner = choice.get("message") or choice.get("delta")
    return str(choice["text"] if inner is None else inner["content"])


def alone(url: str, asked: Ask) -> list[str]:
    """The texts of a request that runs alone."""
    body = {**json.loads(asked.body), "stream": False, "stream_options": None}
    answer = httpx.post(f"{url}{asked.path}", json=body, timeout=_LIMIT_S)
    answer.raise_for_status()
    return [_text(choice) for choice in answer.json()["choices"]]
