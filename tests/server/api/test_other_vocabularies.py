"""Models with other numbers of rows than their tokenizers have tokens, and requests of any field.

Published checkpoints have both: rows are padded for the hardware, and tokens are added later.
"""

import json
import threading
from collections.abc import Iterator
from typing import Any, Self

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ropewalk.server.api.completion_schema import CompletionRequest
from ropewalk.server.turns.chat_schema import ChatRequest
from tests.checkpoints.other_vocabularies import MARKERS, NUM_TOKENS, resized
from tests.server.api import asking
from tests.server.fuzz.fuzz_bodies import limits
from tests.servers.processes import Server, running_server

FEWER_ROWS, MORE_ROWS = NUM_TOKENS - 8, NUM_TOKENS + 150
WITHOUT_ROWS = ("precated", "ose", "leg", " res", "fact", "riter", " temp")  # the last tokens
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PROMPT = "import os\n\ndef join(a, b):\n    return"
OTHERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2},
]

_EDGES = (0, 1, FEWER_ROWS, NUM_TOKENS, NUM_TOKENS + len(MARKERS), MORE_ROWS)
_ID = st.sampled_from(sorted({max(0, edge + step) for edge in _EDGES for step in (-1, 0, 1)}))
_IDS = st.lists(_ID, max_size=5)
_WORD = st.sampled_from([*WITHOUT_ROWS, *MARKERS, "<|eos|>", " return", "a", " ", "é", "\n"])
_WORDS = st.lists(_WORD, min_size=1, max_size=3)
_SCHEMAS = st.sampled_from([{"const": "a temp riter"}, {"enum": ["ose", "fact"]}])
_REGEX = st.sampled_from(["( temp|riter)+", "<tool_call>x?", "é{3}"])
# The values of fields whose limits say nothing about tokens; others have those at their limits.
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(_WORD, _IDS, st.lists(_IDS, max_size=2)),
    "messages": _WORD.map(lambda text: [{"role": "user", "content": text}]),
    "logit_bias": st.dictionaries(_ID.map(str), st.sampled_from([-100, 5, 100]), max_size=3),
    "stop_token_ids": _IDS,
    "allowed_token_ids": _IDS,
    "bad_words": _WORDS,
    "stop": _WORDS,
    "guided_choice": _WORDS,
    "guided_regex": _REGEX,
    "guided_json": _SCHEMAS,
    "structured_outputs": st.one_of(
        _WORDS.map(lambda words: {"choice": words}), _SCHEMAS.map(lambda each: {"json": each})
    ),
    "response_format": _SCHEMAS.map(
        lambda each: {"type": "json_schema", "json_schema": {"name": "a", "schema": each}}
    ),
    "prediction": _WORD.map(lambda text: {"type": "content", "content": text * 3}),
    "tools": st.just([TOOL]),
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "logprobs": st.sampled_from([True, 0, 5, 20]),
    "seed": st.integers(-3, 3),
    "n": st.integers(1, 3),
}
_ANY = [True, False, None, 0, 1, 2, -1, "a", [], {}]


def _body(model: type[CompletionRequest | ChatRequest]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with one to four of the model's fields."""
    base: dict[str, Any] = {"prompt": PROMPT}
    if model is ChatRequest:
        base = {"messages": [{"role": "user", "content": PROMPT}]}
    base |= {"max_tokens": 8, "temperature": 0}
    at_limits: dict[str, list[Any]] = {}
    for name, text in limits(model):
        at_limits.setdefault(name, []).append(json.loads(text))
    values = {
        name: st.sampled_from(at_limits.get(name, _ANY))
        for name in model.model_fields
        if name not in _VALUES
    }
    values |= {name: each for name, each in _VALUES.items() if name in model.model_fields}

    def with_fields(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({name: values[name] for name in names})

    names = st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=4, unique=True)
    return names.flatmap(with_fields).map(lambda fields: {**base, **fields})


# Only the tests that draw bodies pay for the texts at every limit.
_ASKED = st.deferred(
    lambda: st.one_of(
        st.tuples(st.just("completions"), _body(CompletionRequest)),
        st.tuples(st.just("chat/completions"), _body(ChatRequest)),
    )
)


@pytest.fixture(scope="module", params=[FEWER_ROWS, MORE_ROWS], ids=["more tokens", "more rows"])
def unequal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose model has fewer or more rows than tokens, and an end token behind all."""
    folder = resized(tmp_path_factory.mktemp("model") / "model", request.param)
    stated = {"eos_token_id": [1, NUM_TOKENS + 2]}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    with running_server(str(folder), "--device", "cpu", "--threads", "1") as server:
        yield server


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)


def streamed(server: Server, **fields: Any) -> str:
    """The text of a stream, none of whose events is an error."""
    body = {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True, **fields}
    events = asking.streamed(server, "completions", **body)
    return "".join(each["choices"][0]["text"] for each in events)


def text_of(server: Server, **fields: Any) -> str:
    """The text of a greedy completion."""
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, **fields}
    return str(asking.asked(server, "completions", **body)["choices"][0]["text"])


def test_a_choice_is_spelt_with_the_tokens_that_the_model_has(unequal: Server) -> None:
    """A marker is text where it has no row. Elsewhere it is a token that no text matches."""
    words = [*WITHOUT_ROWS[::3]]
    if httpx.get(f"{unequal.url}/tokenizer_info").json()["vocab_size"] < NUM_TOKENS:
        words.append(MARKERS[0])
    assert [text_of(unequal, guided_choice=[word]) for word in words] == words


def test_a_text_that_a_grammar_forces_has_rows(unequal: Server) -> None:
    """Drafts of the grammar are computed as inputs."""
    text = "a temp riter " * 3
    assert json.loads(text_of(unequal, guided_json={"const": text})) == text


def test_a_word_that_cannot_come_bars_nothing(unequal: Server) -> None:
    """Such words are left out, and those beside them are barred."""
    words = [*WITHOUT_ROWS, *MARKERS]
    assert text_of(unequal, bad_words=words) == text_of(unequal)
    assert text_of(unequal, bad_words=[*words, " a"]) == text_of(unequal, bad_words=[" a"])


def test_end_tokens_and_markers_without_rows_are_left_out(unequal: Server) -> None:
    """The checkpoint has an end token behind all rows, and a chat may bar the marker of calls."""
    assert text_of(unequal, min_tokens=5) == text_of(unequal)
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    asking.asked(unequal, "chat/completions", **chat, tools=[TOOL], tool_choice="none")


class Neighbours:
    """Clients whose streams run all the time, and have to be the same each time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ends = threading.Event()
        self.num_streams, self.faults = 0, list[str]()
        expected = [streamed(server, **each) for each in OTHERS]
        self._threads = [
            threading.Thread(target=self._run, args=pair)
            for pair in zip(OTHERS, expected, strict=True)
        ]

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for each in self._threads:
            each.join()

    def _run(self, fields: dict[str, Any], expected: str) -> None:
        while not self._ends.is_set():
            try:
                found = streamed(self._server, **fields)
                assert found == expected
            except Exception as error:  # noqa: BLE001  # told by the test's own thread
                self.faults.append(f"{fields}: {error!r}")
                return
            self.num_streams += 1


def test_no_field_of_a_request_ends_the_streams_of_others(unequal: Server) -> None:
    """Each request has an answer or a refusal, and no row of a step fails."""
    first_line = len(unequal.log)
    with Neighbours(unequal) as neighbours:

        @settings(
            max_examples=25,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # the first body that fails is small enough
        )
        @given(asked=_ASKED)
        def run(asked: tuple[str, dict[str, Any]]) -> None:
            route, body = asked
            answer = post(unequal, route, **body)
            assert answer.status_code in (200, 400), f"{route} {body}: {answer.text}"
            assert '"server_error"' not in answer.text, f"{route} {body}: {answer.text}"
            assert not neighbours.faults, f"{route} {body}: {neighbours.faults}"

        run()
    assert not neighbours.faults
    assert neighbours.num_streams >= len(OTHERS)
    assert not [line for line in unequal.log[first_line:] if "level=error" in line]
