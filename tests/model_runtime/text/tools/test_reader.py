"""Reading answers: the parts do not depend on how the text is cut, and nothing is lost."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model_runtime.text.tools.answer_reader import (
    AnswerReader,
    Event,
    ReadingPlan,
    ReasoningDelta,
    TextDelta,
)
from ropewalk.model_runtime.text.tools.call_stream import CallEnd, CallPiece, CallStart
from ropewalk.model_runtime.text.tools.tool_format import (
    GENERIC,
    KNOWN_FORMATS,
    ReasoningFormat,
    Tool,
    ToolCall,
    ToolFormat,
)

Part = Event | ToolCall
THINK = ReasoningFormat("<think>", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = {name: Tool(name, None, SCHEMA) for name in ("look", "look_up")}
PARIS = ToolCall("look", {"city": "Paris", "days": 3})
ROME = ToolCall("look_up", {"city": "Rome", "days": 4})
NAMED = ToolFormat("n", "named", "[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "", "[TOOL_CALLS]", "")
FENCED = ToolFormat(
    "f", "named", "<calls><call>function<sep>", "\n```json\n", "\n```</call><call>function<sep>",
    "\n```</call></calls>", "<calls><call>function<sep>", "```</call></calls>",
)  # fmt: skip


def written(found: ToolFormat, *calls: ToolCall) -> str:
    """Calls as a model writes them that keeps to the format."""

    def arguments(call: ToolCall) -> str:
        if found.shape == "tagged":
            return "".join(
                f"<parameter={key}>\n{value}\n</parameter>\n"
                for key, value in call.arguments.items()
            )
        if found.shape == "python":
            pairs = call.arguments.items()
            return ", ".join(f"{key}={json.dumps(value)}" for key, value in pairs)
        return json.dumps(call.arguments)

    bodies = [call.name + found.middle + arguments(call) for call in calls]
    return found.head + (found.between or "").join(bodies) + found.tail


def read(plan: ReadingPlan, pieces: Sequence[str], *, is_cut: bool = False) -> AnswerReader:
    """A reader that has read the pieces; its events are in `found`."""
    reader = AnswerReader(plan)
    events = [event for piece in pieces for event in reader.feed(piece)]
    reader.found = joined([*events, *reader.finish(is_cut=is_cut)])  # type: ignore[attr-defined]
    return reader


def events_of(plan: ReadingPlan, *pieces: str, is_cut: bool = False) -> list[Part]:
    """The events of the pieces, neighbours of one kind joined, and whole calls as such."""
    found: list[Part] = read(plan, pieces, is_cut=is_cut).found  # type: ignore[attr-defined]
    return found


def joined(events: Sequence[Event]) -> list[Part]:
    """The events with neighbours of one kind joined, and whole calls as such."""
    found: list[Part] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, CallEnd):
            start, piece = found.pop(-2), found.pop(-1)
            assert isinstance(start, CallStart), events
            assert isinstance(piece, CallPiece), events
            found.append(ToolCall(start.name, json.loads(piece.text)))
            assert piece.text == json.dumps(json.loads(piece.text), ensure_ascii=False)
            continue
        for kind in (TextDelta, ReasoningDelta, CallPiece):
            if isinstance(event, kind) and isinstance(last, kind):
                found[-1] = kind(last.text + event.text)
                break
        else:
            found.append(event)
    return found


def plan_of(found: ToolFormat, **more: object) -> ReadingPlan:
    """A plan with both tools."""
    return ReadingPlan(found, TOOLS, **more)  # type: ignore[arg-type]


FORMATS = [*KNOWN_FORMATS.values(), NAMED, FENCED]


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("found", FORMATS, ids=lambda each: each.name)
def test_calls_are_read_wherever_their_text_is_cut(found: ToolFormat, *, is_held: bool) -> None:
    """One call and two calls, cut at each character, and one character at a time."""
    cases = [[PARIS]] if found.between is None else [[PARIS], [PARIS, ROME]]
    plan = plan_of(found, is_held=is_held)
    for calls in cases:
        text = written(found, *calls)
        assert events_of(plan, text) == calls
        assert events_of(plan, *text) == calls
        for at in range(len(text)):
            assert events_of(plan, text[:at], text[at:]) == calls, text[:at]


@pytest.mark.parametrize("found", FORMATS, ids=lambda each: each.name)
def test_held_arguments_come_as_they_are_written(found: ToolFormat) -> None:
    """The name comes before the arguments, and nothing of them waits for the call's end.

    Arguments between tags come one by one.
    """
    reader, seen = AnswerReader(plan_of(found, is_held=True)), list[Event]()
    before_city = written(found, PARIS).partition("Paris")[0]
    seen += reader.feed(before_city)
    assert seen[0] == CallStart("look")
    seen += reader.feed("Par")
    told = "".join(each.text for each in seen if isinstance(each, CallPiece))
    assert told == ("" if found.shape == "tagged" else '{"city": "Par')
    seen += reader.feed(written(found, PARIS)[len(before_city) + 3 :].partition("days")[0])
    told = "".join(each.text for each in seen if isinstance(each, CallPiece))
    assert told == '{"city": "Paris"'


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("found", FORMATS, ids=lambda each: each.name)
def test_a_cut_call_has_its_arguments_up_to_there(found: ToolFormat, *, is_held: bool) -> None:
    """Once its arguments have begun; before, the text comes back whole."""
    text, whole = written(found, PARIS), json.dumps(PARIS.arguments)
    begun_at = len(found.head + "look" + found.middle)
    for length in range(1, len(text)):
        reader = read(plan_of(found, is_held=is_held), text[:length], is_cut=True)
        events: list[Part] = reader.found  # type: ignore[attr-defined]
        if length <= begun_at:
            assert events in ([TextDelta(text[:length])], [CallStart("look")]), text[:length]
        elif events != [PARIS]:
            start, *pieces = events
            assert start == CallStart("look"), text[:length]
            told = "".join(each.text for each in pieces if isinstance(each, CallPiece))
            assert whole.startswith(told), text[:length]
        if events != [TextDelta(text[:length])] or reader.num_cut:
            assert (reader.num_calls, reader.num_cut) == ((1, 0) if events == [PARIS] else (0, 1))


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize(
    "found", [each for each in FORMATS if each.between], ids=lambda each: each.name
)
def test_a_cut_call_leaves_no_text_beside_a_whole_one(found: ToolFormat, *, is_held: bool) -> None:
    """Neither markers nor half a name, at every length."""
    text, first = written(found, PARIS, ROME), written(found, PARIS)
    for length in range(len(first), len(text)):
        for pieces in ([text[:length]], [*text[:length]]):
            events = events_of(plan_of(found, is_held=is_held), *pieces, is_cut=True)
            assert events[0] == PARIS, text[:length]
            assert not [each for each in events if isinstance(each, TextDelta)], text[:length]


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize(
    "found", [each for each in FORMATS if each.between], ids=lambda each: each.name
)
def test_an_equal_call_is_left_out(found: ToolFormat, *, is_held: bool) -> None:
    """A call that begins like an earlier one is not, and a cut call is if it may be equal."""
    almost = ToolCall("look", {"city": "Paris", "days": 31})
    text = written(found, PARIS, PARIS, almost, ROME, ROME, PARIS)
    plan = plan_of(found, is_held=is_held)
    for pieces in ([text], [*text]):
        reader = read(plan, pieces)
        assert reader.found == [PARIS, almost, ROME]  # type: ignore[attr-defined]
        assert (reader.num_calls, reader.num_repeated) == (3, 3)
    twice = written(found, PARIS, PARIS)
    assert events_of(plan, *twice[: twice.rindex("days")], is_cut=True) == [PARIS]


@pytest.mark.parametrize(
    "found", [each for each in FORMATS if each.marker], ids=lambda each: each.name
)
def test_text_and_calls_alternate(found: ToolFormat) -> None:
    """Whitespace between text and a call belongs to neither."""
    text = f"First.\n\n{written(found, PARIS)}"
    assert events_of(plan_of(found), *text) == [TextDelta("First."), PARIS]
    if found.close:
        text += "\nThen.\n" + written(found, ROME) + "\n"
        expected = [TextDelta("First."), PARIS, TextDelta("Then."), ROME]
        assert events_of(plan_of(found), *text) == expected
        assert events_of(plan_of(found), text) == expected


@pytest.mark.parametrize(
    "found", [each for each in FORMATS if each.marker], ids=lambda each: each.name
)
def test_prose_that_mentions_the_marker_goes_on(found: ToolFormat) -> None:
    """The text comes as soon as the marker turns out to be no call, not at the end."""
    text = f"Write {found.marker} ! to call."
    assert events_of(plan_of(found), *text) == [TextDelta(text)]
    reader = AnswerReader(plan_of(found))
    sent = "".join(event.text for event in reader.feed(text) if isinstance(event, TextDelta))
    assert sent == text


BROKEN = [
    '{"name": "look", "arguments": {"city": }}',
    '{"name": "other", "arguments": {}}',
    '{"name": "look"}',
    '{"name": 3, "arguments": {}}',
    '{"name": "look", "arguments": [1]}',
    '{"name": "look", "arguments": {"days": NaN}}',
    '{"name": "look", "arguments": {"days": 1e999}}',
    "[]",
    "{" * 2000,
]


@pytest.mark.parametrize("body", BROKEN)
def test_a_call_that_cannot_be_read_is_text(body: str) -> None:
    """The call after it is read."""
    text = f"a <tool_call>{body}</tool_call> b\n{written(GENERIC, ROME)}"
    expected = [TextDelta(f"a <tool_call>{body}</tool_call> b"), ROME]
    assert events_of(plan_of(GENERIC), text) == expected
    reader = read(plan_of(GENERIC), text)
    assert (reader.num_calls, reader.num_unparsed, reader.num_cut) == (1, 1, 0)
    assert reader.found == expected  # type: ignore[attr-defined]


def test_a_close_inside_a_string_ends_nothing() -> None:
    """An argument may be about tool calls."""
    call = ToolCall("look", {"city": 'say "</tool_call>"', "days": 1})
    assert events_of(plan_of(GENERIC), *written(GENERIC, call)) == [call]


def test_arguments_written_as_text_are_read() -> None:
    """Some models quote the whole object."""
    text = '<tool_call>{"name": "look", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
    assert events_of(plan_of(GENERIC), text) == [ToolCall("look", {"city": "Paris"})]


def test_an_answer_that_begins_as_no_call_is_text() -> None:
    """Formats without a marker look at the first character only."""
    found = KNOWN_FORMATS["llama-json"]
    text = 'Here: {"name": "look", "parameters": {}}'
    assert events_of(plan_of(found), *text) == [TextDelta(text)]
    assert events_of(plan_of(found), '{"a": 1}') == [TextDelta('{"a": 1}')]
    reader = AnswerReader(plan_of(found))
    assert reader.feed('{ "answer"') == [TextDelta('{ "answer"')]
    assert [*reader.feed(": 1}"), *reader.finish(is_cut=True)] == [TextDelta(": 1}")]
    assert (reader.num_cut, reader.num_unparsed) == (0, 0)


def test_python_is_read_like_json() -> None:
    """Its quotes, words, tuples, and numbers in quotes, with a grammar and without."""
    found = KNOWN_FORMATS["pythonic"]
    text = (
        """[look(city='say "it\\'s"', days=None), look_up(city="1", days='2', more=('a', True))]"""
    )
    calls = [
        ToolCall("look", {"city": 'say "it\'s"', "days": None}),
        ToolCall("look_up", {"city": "1", "days": 2, "more": ["a", True]}),
    ]
    for is_held in (False, True):
        assert events_of(plan_of(found, is_held=is_held), *text) == calls
    reader = read(plan_of(found), 'look(city="Paris") looks.')
    assert reader.found == [TextDelta('look(city="Paris") looks.')]  # type: ignore[attr-defined]
    assert reader.num_unparsed == 0


def test_an_object_may_have_its_names_in_any_order() -> None:
    """And names that calls of other servers have."""
    body = '{"type": "function", "id": "a", "parameters": {"city": "Paris"}, "name": "look"}'
    for found in (GENERIC, KNOWN_FORMATS["llama-json"]):
        text = f"{found.marker}{body}{found.close}"
        assert events_of(plan_of(found), *text) == [ToolCall("look", {"city": "Paris"})]


def test_values_of_tags_have_the_types_of_the_schema() -> None:
    """A string stays a string, though it looks like a number."""
    found = KNOWN_FORMATS["qwen3-coder"]
    call = ToolCall("look", {"city": "75001", "days": 3})
    assert events_of(plan_of(found), *written(found, call)) == [call]
    several = ToolCall("look", {"city": "one\ntwo\n", "days": 3})
    assert events_of(plan_of(found), *written(found, several)) == [several]


@pytest.mark.parametrize("begins", [False, True])
def test_reasoning_comes_apart(*, begins: bool) -> None:
    """The prompt may have opened it; calls inside of it are reasoning."""
    inner = f"I could write {written(GENERIC, PARIS)}."
    text = f"{'' if begins else '<think>'}\n{inner}\n</think>\n\nSo: {written(GENERIC, ROME)}"
    plan = plan_of(GENERIC, reasoning=THINK, begins_in_reasoning=begins)
    expected = [ReasoningDelta(inner), TextDelta("So:"), ROME]
    assert events_of(plan, text) == expected
    for at in range(len(text)):
        assert events_of(plan, text[:at], text[at:]) == expected


def test_reasoning_is_only_at_the_beginning() -> None:
    """A later marker is text, as in an answer about such models."""
    text = "The tag <think> opens, </think> closes."
    assert events_of(ReadingPlan(reasoning=THINK), *text) == [TextDelta(text)]


def test_reasoning_that_never_ends_is_reasoning() -> None:
    """An answer may be cut inside of it."""
    plan = ReadingPlan(reasoning=THINK, begins_in_reasoning=True)
    assert events_of(plan, *"so </thin", is_cut=True) == [ReasoningDelta("so </thin")]


ALPHABET = st.lists(
    st.sampled_from([
        *'ab{}[] \n"', "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]",
        '{"name": "look", "arguments": {}}', '{"name": "look", "parameters": {}}',
        "<function=look>",
        "</function>", "[look()]", "look", "[ARGS]", "{}",
    ]),
    max_size=12,
)  # fmt: skip


@settings(deadline=None, max_examples=80)
@given(
    parts=ALPHABET,
    found=st.sampled_from(FORMATS),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    data=st.data(),
)
def test_any_text_is_read_alike_however_it_is_cut(
    parts: list[str], found: ToolFormat, flags: tuple[bool, bool, bool], data: st.DataObject
) -> None:
    """Nothing raises, and the parts of the whole are the parts of the pieces."""
    begins, is_cut, is_held = flags
    plan = plan_of(found, reasoning=THINK, begins_in_reasoning=begins, is_held=is_held)
    text = "".join(parts)
    whole = events_of(plan, text, is_cut=is_cut)
    assert events_of(plan, *text, is_cut=is_cut) == whole
    at = data.draw(st.integers(0, len(text)))
    assert events_of(plan, text[:at], text[at:], is_cut=is_cut) == whole
    parts_of_others = ToolCall | CallStart | ReasoningDelta
    if not any(isinstance(each, parts_of_others) for each in whole) and not begins:
        kept = "".join(each.text for each in whole if isinstance(each, TextDelta))
        assert kept == text or "<think>" in text
