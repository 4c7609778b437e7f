"""Requests go where they cost least, and every load that was counted is taken back."""

import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.rope import Linear, Profile, Tier
from ropewalk.server.replicas.choice import DECODE_WEIGHT, ReplicaChoice
from ropewalk.server.replicas.text_chunks import TextChunks
from tests.server.replicas.simulated import (
    PAGE_SIZE,
    TIERS,
    Outcome,
    chunked,
    prompt_of,
    served,
)

TWO = {"a": 28, "b": 28}  # pages: seven prefixes of four


def shuffled_prefixes(seed: int) -> list[TextChunks]:
    """Twelve prefixes of four pages, ten prompts each."""
    prompts = [prompt_of(prefix, 4, number) for prefix in range(12) for number in range(10)]
    random.Random(seed).shuffle(prompts)
    return prompts


def outcomes(routing: str, in_flight: int) -> list[Outcome]:
    """The same prompts under ten seeds."""
    return [
        served(
            ReplicaChoice(routing),  # type: ignore[arg-type]
            shuffled_prefixes(seed),
            TWO,
            in_flight,
            random.Random(seed),
        )
        for seed in range(10)
    ]


@pytest.mark.parametrize("in_flight", [1, 2, 4, 8])
def test_prefixes_stay_where_they_are_cached(in_flight: int) -> None:
    """Two replicas have room for seven of twelve prefixes each, so one alone is too small."""
    best = 0.9  # each prefix is computed once, and found nine times
    by_prefix = outcomes("prefix", in_flight)
    assert fmean(each.hit_share for each in by_prefix) >= 0.95 * best
    if in_flight == 1:  # the load, which sends some elsewhere, is nothing
        assert {each.hit_share for each in by_prefix} == {best}
    for routing in ("round_robin", "least_loaded"):
        others = outcomes(routing, in_flight)
        assert fmean(each.hit_share for each in others) <= 0.85 * best
        assert max(each.hit_share for each in others) < min(each.hit_share for each in by_prefix)
    for each in by_prefix:
        assert abs(each.num_predicted - each.num_cached) <= 0.02 * each.num_pages
        assert each.imbalance <= 1.25


@pytest.mark.parametrize("seed", range(5))
def test_a_hot_prefix_is_spread(seed: int) -> None:
    """Four fifths of the traffic share a prefix, and yet no replica has much more than the mean."""
    rng = random.Random(seed)
    prompts = [
        prompt_of(0 if rng.random() < 0.8 else rng.randrange(1, 20), 4, number)
        for number in range(600)
    ]
    outcome = served(ReplicaChoice(), prompts, dict.fromkeys("abcd", 120), 64, rng)
    assert outcome.imbalance <= 1.25
    assert outcome.hit_share >= 0.9


def test_a_queue_that_costs_more_than_the_prefix_sends_requests_elsewhere() -> None:
    """The prefix is then cached on both."""
    choice, asked = ReplicaChoice(), prompt_of(1, 4)
    choice.update(TWO)
    holder, other = choice.rank(asked, TWO, "first")
    choice.routed("first", asked, holder)
    choice.first_token("first")
    assert choice.rank(asked, TWO, "second")[0] == holder
    num_running = int(4 * PAGE_SIZE / DECODE_WEIGHT) + 1  # the cached pages are worth this many
    for number in range(num_running):
        choice.routed(f"more-{number}", asked, holder)
        choice.first_token(f"more-{number}")
    assert choice.rank(asked, TWO, "spilt")[0] == other
    assert choice.routed("spilt", asked, other) == 0
    assert choice.routed("again", asked, other) == 4 * PAGE_SIZE


def test_new_prefixes_go_to_the_emptiest_of_idle_replicas() -> None:
    """Equal costs are not left to the hash alone, which may fill one side."""
    choice = ReplicaChoice()
    choice.update(TWO)
    for number in range(10):
        asked = prompt_of(number, 2)
        choice.routed(str(number), asked, choice.rank(asked, TWO, str(number))[0])
        choice.ended(str(number))
    assert choice.num_remembered("a") == choice.num_remembered("b") == 10


def test_a_page_that_would_be_evicted_counts_like_one_that_is_computed() -> None:
    """A full replica gets a new prompt only when the other's load is worth more than its pages."""
    choice = ReplicaChoice()
    choice.update({"full": 4, "roomy": 40})
    choice.routed("old", prompt_of(1, 4), "full")
    choice.ended("old")
    asked = prompt_of(2, 3)
    num_running = 0
    while choice.rank(asked, ["full", "roomy"], "new")[0] == "roomy":
        choice.routed(f"{num_running}", prompt_of(3, 4), "roomy")
        choice.first_token(f"{num_running}")
        num_running += 1
    # At equal cost both remember as many pages, and either may be first.
    assert num_running - 3 * PAGE_SIZE / DECODE_WEIGHT in {0, 1}


def test_another_salt_or_profile_never_matches() -> None:
    """The tokens are the same in all three prompts."""
    tokens = list(range(5 * PAGE_SIZE))
    other_table = (Tier(1 << 20, 2.0, Profile(Linear(factor=2.0))),)
    choice = ReplicaChoice()
    choice.add("a", 100)
    choice.routed("first", chunked(tokens, TIERS, "", PAGE_SIZE), "a")
    assert choice.routed("salt", chunked(tokens, TIERS, "s", PAGE_SIZE), "a") == 0
    assert choice.routed("table", chunked(tokens, other_table, "", PAGE_SIZE), "a") == 0
    same = choice.routed("same", chunked(tokens, TIERS, "", PAGE_SIZE), "a")
    assert same == 4 * PAGE_SIZE, "the last page holds the last token"


def test_routers_with_equal_views_choose_equally() -> None:
    """The order of the candidates does not matter, nor does the process."""
    names = [f"replica-{number}" for number in range(5)]
    views = [ReplicaChoice(), ReplicaChoice()]
    for choice, order in zip(views, (names, names[::-1]), strict=True):
        choice.update(dict.fromkeys(order, 50))
    for number in range(50):
        asked = prompt_of(number % 7, number % 3, number)  # some have no full page
        ranks = [
            choice.rank(asked, order, str(number))
            for choice, order in zip(views, (names, names[::-1]), strict=True)
        ]
        assert ranks[0] == ranks[1]
        assert sorted(ranks[0]) == names
        for choice in views:
            choice.routed(str(number), asked, ranks[0][0])
            if number % 2:
                choice.ended(str(number))


def test_prompts_without_a_full_page_are_spread_by_load() -> None:
    """There is nothing to find again."""
    choice = ReplicaChoice()
    choice.update(dict.fromkeys("abcd", 10))
    asked = prompt_of(0, 0)
    for number in range(8):
        choice.routed(str(number), asked, choice.rank(asked, "abcd", str(number))[0])
    assert [choice.load(name)[0] for name in "abcd"] == [2 * asked.num_tokens] * 4


def test_the_other_ways_know_nothing_of_prefixes() -> None:
    """One goes round, the other counts open requests."""
    asked = prompt_of(1, 4)
    in_turn = ReplicaChoice("round_robin")
    in_turn.update(dict.fromkeys("abc", 100))
    assert [in_turn.rank(asked, "cab", "r")[0] for _ in range(6)] == list("abcabc")
    assert in_turn.rank(asked, "", "r") == []
    least = ReplicaChoice("least_loaded")
    least.update(dict.fromkeys("ab", 100))
    least.routed("one", asked, "a")
    assert least.rank(asked, "ab", "r") == ["b", "a"]
    least.routed("two", prompt_of(2, 1), "b")
    least.routed("three", prompt_of(3, 1), "b")
    assert least.rank(asked, "ab", "r") == ["a", "b"]
    with pytest.raises(ValueError, match="routing must be one of prefix, least_loaded"):
        ReplicaChoice("prefxi")  # type: ignore[arg-type]


def test_the_loads_count_queued_tokens_then_running_requests() -> None:
    """Each call is idempotent; a request that is tried elsewhere moves."""
    choice, asked = ReplicaChoice(), prompt_of(1, 4)
    choice.update(TWO)
    assert choice.routed("r", asked, "a") == 0
    assert choice.load("a") == (asked.num_tokens, 0)
    assert choice.cost(asked, "a") == asked.num_tokens + 5, "its pages count as cached"
    choice.routed("r", asked, "b")
    assert (choice.load("a"), choice.load("b")) == ((0, 0), (asked.num_tokens, 0))
    for _ in range(2):
        choice.first_token("r")
        assert choice.load("b") == (0, 1)
    assert choice.cost(asked, "b") == 5 + DECODE_WEIGHT
    for _ in range(2):
        choice.ended("r")
        assert choice.load("b") == (0, 0)
    choice.first_token("r")
    assert choice.num_open == 0


def test_a_replica_that_comes_back_has_neither_load_nor_pages() -> None:
    """It is another process. A request that still ends on the first one is not counted twice."""
    choice, asked = ReplicaChoice(), prompt_of(1, 4)
    choice.update(TWO)
    choice.routed("old", asked, "a")
    choice.update({"b": 28})
    assert choice.replicas == ("b",)
    assert choice.routed("late", asked, "a") == 0
    assert choice.rank(asked, ["a", "b"], "late")[0] in {"a", "b"}
    choice.update(TWO)
    assert choice.load("a") == (0, 0)
    assert choice.num_remembered("a") == 0
    choice.routed("new", asked, "a")
    choice.first_token("old")
    choice.ended("old")
    assert choice.load("a") == (asked.num_tokens, 0)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["routed", "first_token", "ended", "remove", "add"]),
        st.integers(0, 5),  # the request
        st.sampled_from("abc"),
        st.integers(0, 4),  # its prefix
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_loads_return_to_zero_and_memories_keep_their_bound(
    events: list[tuple[str, int, str, int]],
) -> None:
    """Successes, errors, aborts and lost replicas may come in any order, and twice."""
    choice = ReplicaChoice()
    for name in "abc":
        choice.add(name, 6)
    for event, number, name, prefix in events:
        if event == "routed":
            choice.routed(f"{number}", prompt_of(prefix, 4), name)
        elif event == "remove":
            choice.remove(name)
        elif event == "add":
            choice.add(name, 6)
        else:
            getattr(choice, event)(f"{number}")
        loads = [choice.load(each) for each in "abc"]
        assert all(queued >= 0 and running >= 0 for queued, running in loads)
        assert all(choice.num_remembered(each) <= 6 for each in "abc")
    for number in range(6):
        choice.ended(f"{number}")
    assert [choice.load(each) for each in "abc"] == [(0, 0)] * 3
    assert choice.num_open == 0


def test_pages_in_a_shared_place_are_cheap_for_all_who_share_it() -> None:
    """A small queue sends the prompt to the other who can read it, and to none who cannot."""
    choice, asked = ReplicaChoice(), prompt_of(1, 40)
    pages = dict.fromkeys("abc", 400)
    choice.update(pages, {"a": "place", "b": "place", "c": "another"})
    assert choice.routed("first", asked, "a") == 0
    choice.ended("first")
    tail, whole = 5, 40 * PAGE_SIZE
    assert [choice.cost(asked, each) for each in "abc"] == [tail, tail + whole / 10, tail + whole]
    for number in range(1 + int(whole / 10 / DECODE_WEIGHT)):
        choice.routed(f"{number}", asked, "a")
        choice.first_token(f"{number}")
    assert choice.rank(asked, pages, "spilt") == ["b", "a", "c"]
    assert choice.routed("spilt", asked, "b") == whole
    assert choice.load("b") == (tail + whole // 10, 0)
    choice.update({"c": 400})
    choice.update(pages, {"a": "place", "b": "place"})
    assert choice.cost(asked, "a") == tail + whole / 10  # a new one reads what others wrote
    assert choice.cost(asked, "c") == tail + whole


def test_an_evicted_page_is_cheap_if_a_shared_place_has_it() -> None:
    """It is read again, and not computed."""
    costs = []
    for place in (None, "place"):
        choice = ReplicaChoice()
        choice.update({"full": 4}, {"full": place})
        choice.routed("old", prompt_of(1, 4), "full")
        choice.ended("old")
        costs.append(choice.cost(prompt_of(2, 4), "full") - prompt_of(2, 4).num_tokens)
    assert costs == pytest.approx([4 * PAGE_SIZE, 0.4 * PAGE_SIZE])


def test_few_places_are_remembered_that_no_replica_has_any_more() -> None:
    """An upgrade of a fleet makes new places. One that comes back soon is known."""
    choice = ReplicaChoice()
    for number in range(100):
        choice.update({"a": 4}, {"a": f"place {number}"})
        assert len(choice._places) <= 9
    asked = prompt_of(1, 4)
    choice.routed("first", asked, "a")
    choice.update({})
    choice.update({"b": 4}, {"b": "place 99"})
    assert choice.cost(asked, "b") < asked.num_tokens
