"""The routing state of an API process: loads are counted at once, and all of them taken back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.server.replicas.choice import ReplicaChoice
from ropewalk.server.replicas.routes import Asked, Routes
from tests.server.replicas.simulated import prompt_of

TWO = {"a": 40, "b": 40}


def routes_of(num_pages: dict[str, int], silence_lasts_s: float = 30.0) -> Routes:
    """Routes to these replicas."""
    routes = Routes(silence_lasts_s)
    routes.configure(ReplicaChoice())
    routes.update(num_pages)
    return routes


def asked(prefix: int = 1, *, avoid: frozenset[str] = frozenset()) -> Asked:
    """A prompt of four pages."""
    return Asked(prompt_of(prefix, 4), avoid)


def test_requests_that_are_routed_together_see_each_other() -> None:
    """The first choice counts before a replica has accepted anything."""
    routes, chosen = routes_of(TWO), []
    for number in range(6):
        routes.begin(f"{number}", asked(number))
        chosen.append(routes.rank(f"{number}", TWO)[0])
    assert chosen.count("a") == chosen.count("b") == 3
    assert routes.choice.load("a") == routes.choice.load("b") == (3 * 261, 0)


def test_the_load_moves_to_the_replica_that_accepts() -> None:
    """The first choice may refuse. A later rank of the same request does not count it twice."""
    routes = routes_of(TWO)
    routes.begin("r", asked())
    first, second = routes.rank("r", TWO)
    routes.routed("r", second)
    assert routes.replica_of("r") == second
    assert routes.choice.load(first) == (0, 0)
    assert routes.choice.load(second) == (261, 0)
    routes.rank("r", TWO)
    assert routes.choice.num_open == 1


def test_the_predicted_tokens_are_those_of_the_replica_that_accepts() -> None:
    """It had the prefix before the request."""
    routes = routes_of(TWO)
    routes.begin("first", asked())
    holder = routes.rank("first", TWO)[0]
    assert routes.num_predicted("first") == 0
    routes.end("first")
    routes.begin("second", asked())
    assert routes.rank("second", TWO)[0] == holder
    assert routes.num_predicted("second") == 256
    routes.end("second")
    assert routes.num_predicted("second") == 0


def test_replicas_that_lost_a_request_are_not_tried() -> None:
    """Other requests go there."""
    routes = routes_of(TWO)
    routes.begin("r", asked(avoid=frozenset("a")))
    assert routes.rank("r", TWO) == ["b"]
    routes.begin("s", asked(avoid=frozenset("ab")))
    assert routes.rank("s", TWO) == []
    assert routes.replica_of("s") is None
    routes.begin("t", asked(2))
    assert set(routes.rank("t", TWO)) == {"a", "b"}


def test_each_try_is_announced_before_it_is_made() -> None:
    """Its time limit begins then."""
    routes, tries = routes_of(TWO), list[str]()
    routes.begin("r", Asked(prompt_of(1, 4), frozenset(), lambda: tries.append("r")))
    routes.rank("r", [])
    assert tries == []
    routes.rank("r", TWO)
    assert tries == ["r"]


def test_a_silent_replica_is_tried_last_until_it_is_heard() -> None:
    """Even if it has the prefix and no load."""
    routes = routes_of(TWO)
    routes.begin("first", asked())
    holder, other = routes.rank("first", TWO)
    routes.end("first")
    routes.fell_silent(holder)
    routes.begin("second", asked())
    assert routes.rank("second", TWO) == [other, holder]
    routes.end("second")
    routes.heard(None)
    routes.heard(holder)
    routes.begin("third", asked())
    assert set(routes.rank("third", TWO)) == {holder, other}
    assert not routes._silent


def test_silence_is_forgotten_after_a_while_and_with_the_replica() -> None:
    """A replica that gets no request is never heard, so it would be last forever."""
    fresh = routes_of(TWO)
    fresh.begin("r", asked())
    first = fresh.rank("r", TWO)[0]
    routes = routes_of(TWO, silence_lasts_s=0.0)
    routes.fell_silent(first)
    routes.begin("r", asked())
    assert routes.rank("r", TWO)[0] == first
    routes = routes_of(TWO)
    routes.fell_silent("a")
    routes.update({"b": 40})
    routes.update(TWO)
    assert not routes._silent


def test_an_event_after_the_end_of_a_request_counts_nothing() -> None:
    """Ray's router may still be at work on it."""
    routes = routes_of(TWO)
    routes.begin("r", asked())
    routes.end("r")
    routes.end("r")
    assert routes.rank("r", TWO) == []
    routes.routed("r", "a")
    assert routes.replica_of("r") is None
    assert routes.choice.num_open == 0


NAMES = st.integers(0, 4).map(str)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["begin", "rank", "first_token", "end"]), NAMES),
        st.tuples(st.sampled_from(["routed"]), NAMES, st.sampled_from("ab")),
        st.tuples(st.sampled_from(["fell_silent", "heard"]), st.sampled_from("ab")),
        st.tuples(st.sampled_from(["update"]), st.sampled_from([TWO, {"a": 40}, {}])),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(EVENTS)
def test_end_takes_everything_back_after_any_events(events: list[tuple[str, ...]]) -> None:
    """Nothing of a request is kept, whatever became of it and of its replica."""
    routes = routes_of(TWO)
    for name, *arguments in events:
        match name:
            case "begin":
                routes.begin(arguments[0], asked(avoid=frozenset("b")))
            case "rank":
                routes.rank(arguments[0], TWO)
            case "first_token":
                routes.choice.first_token(arguments[0])
            case _:
                getattr(routes, name)(*arguments)
    for number in range(5):
        routes.end(f"{number}")
    assert [routes._asked, routes._replica_of, routes._num_predicted] == [{}, {}, {}]
    assert routes.choice.num_open == 0
    assert [routes.choice.load(each) for each in "ab"] == [(0, 0), (0, 0)]
