"""Groups of layers with a window hold the pages of their window, and no others."""

import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import TierChoice
from ropewalk.model_runtime.engine.admission import check_request
from ropewalk.model_runtime.errors import CacheCapacityError
from ropewalk.model_runtime.loading.model_config import KVShape
from ropewalk.model_runtime.page_groups import ENDLESS, ONE_GROUP, PageGroups, group_layers
from ropewalk.model_runtime.request import Request, SamplingParams
from ropewalk.model_runtime.scheduling.prefix_cache import PrefixIndex, group_key
from ropewalk.model_runtime.scheduling.scheduler import Scheduler
from ropewalk.model_runtime.scheduling.sequence import HOLE, Sequence
from ropewalk.rope import Profile, Sinks, Tier, Unscaled

PAGE, CHUNK = 4, 16
LAST = 10**6
PLAIN = Tier(LAST, 1.0, Profile(Unscaled()))
SINKS = Tier(LAST, 4.0, Profile(Unscaled(), positions=Sinks(5, 60)))
GEMMA = {index: None if index % 6 == 5 else 24 for index in range(18)}  # as Gemma 3 270M
MIXED = {index: 24 if index < 7 else None for index in range(28)}  # 7 with a window, 21 without
SHAPE = KVShape(1, 256, 256)


def grouped(windows: Mapping[int, int | None], max_len: int = LAST) -> PageGroups:
    """The groups of layers with these windows."""
    groups, reason = group_layers(windows, dict.fromkeys(windows, SHAPE), max_len)
    assert reason is None
    assert groups.has_windows
    return groups


def config_of(windows: Mapping[int, int | None], num_pages: int) -> EngineConfig:
    """A config with so many pages of positions in all layers."""
    return EngineConfig(
        kv_cache_tokens=num_pages * PAGE,
        max_model_len=LAST,
        page_size=PAGE,
        max_num_batched_tokens=CHUNK,
        page_groups=grouped(windows),
    )


def sequence(
    num_tokens: int, tier: Tier = PLAIN, salt: str = "", max_tokens: int = LAST
) -> Sequence:
    """A sequence of one tier, whose tokens count up."""
    tier_choice = TierChoice("m", tier, (), "fixed", None, 32)
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(Request("r", tuple(range(num_tokens)), params, tier_choice, salt))


def step(plan: Scheduler, windows: tuple[int | None, ...]) -> None:
    """Compute a step; every page that a group reads must be held, and by this sequence."""
    for each, chunk in plan.schedule().chunks.items():
        first, last = each.num_computed, each.num_computed + chunk.num_tokens - 1
        method = chunk.tier.profile.positions
        for group, window in enumerate(windows):
            own = each.pages[group :: len(windows)]
            seen = range(0 if window is None else max(0, first - window + 1), last + 1)
            if window is None and method is not None and last >= 65:
                seen = [*range(5), *range(max(5, first - 59), last + 1)]
            assert all(own[at // PAGE] != HOLE for at in seen)
        is_last = chunk.is_last
        plan.computed(chunk)
        if is_last:
            each.token_ids.append(7)


def test_gemma_3_has_six_groups_of_three_layers() -> None:
    """15 layers with a window and 3 without: all pages are of 3 layers."""
    groups = grouped(GEMMA)
    assert groups.num_groups == 6
    assert groups.windows == (None, *[24] * 5)
    assert groups.layers[0] == (5, 11, 17)
    assert sorted(layer for each in groups.layers for layer in each) == list(range(18))
    layout = CacheLayout(dict.fromkeys(GEMMA, SHAPE), torch.float32, PAGE, groups=groups)
    assert len(layout.page_layers) == 3
    assert layout.token_bytes == layout.exact_bytes == 6 * layout.bytes_beyond_windows


@pytest.mark.parametrize(
    ("num_windowed", "num_whole", "size", "num_groups"),
    [(15, 3, 3, 6), (7, 21, 7, 4), (13, 13, 13, 2), (4, 0, 4, 1), (29, 5, 5, 7), (52, 10, 4, 16)],
)
def test_groups_are_large_with_few_places_to_spare(
    num_windowed: int, num_whole: int, size: int, num_groups: int
) -> None:
    """Gemma 3 4B has 29 and 5, and 27B has 52 and 10; some places are without a layer."""
    windows = {at: 24 if at < num_windowed else None for at in range(num_windowed + num_whole)}
    groups = grouped(windows)
    layout = CacheLayout(dict.fromkeys(windows, SHAPE), torch.float32, PAGE, groups=groups)
    assert (len(layout.page_layers), groups.num_groups) == (size, num_groups)
    assert sorted(layout.places()) == sorted(windows)
    assert layout.token_bytes * len(windows) == layout.exact_bytes * size * num_groups


def test_models_without_groups_say_why() -> None:
    """More than 16 groups, layers of several shapes; no word if there is no window to hold."""
    shapes = dict.fromkeys(range(62), SHAPE)
    found = group_layers({at: 24 if at else None for at in range(62)}, shapes, LAST)
    assert found == (ONE_GROUP, "groups of layers alike would be 62, and at most 16 are served")
    shapes = {0: SHAPE, 1: KVShape(1, 512, 512)}
    found = group_layers({0: 24, 1: None}, shapes, LAST)
    assert found == (ONE_GROUP, "its layers differ in heads or dimensions")
    for windows in ({0: None, 1: None}, {0: 24, 1: 24}):
        assert group_layers(windows, dict.fromkeys(windows, SHAPE), 24) == (ONE_GROUP, None)


def test_a_long_context_takes_a_fifth() -> None:
    """Far beyond the window, pages of 15 of 18 layers are those of the window."""
    windows = grouped(GEMMA).windows
    plan = Scheduler(config_of(GEMMA, 600))
    one = sequence(2000)
    plan.add(one)
    for _ in range(200):
        step(plan, windows)
        plan.check_integrity()
    num_positions = len(one.pages) // len(windows)
    before = num_positions * len(windows)  # with all tokens in all layers
    assert one.num_computed > 2000
    assert plan.pool.num_used * 5 <= before
    by_group = [sum(page != HOLE for page in one.pages[group::6]) for group in range(6)]
    assert by_group[0] == num_positions
    assert max(by_group[1:]) <= 24 // PAGE + 2


@pytest.mark.parametrize("windows", [GEMMA, MIXED, dict.fromkeys(range(4), 24)])
@pytest.mark.parametrize("tier", [PLAIN, SINKS])
def test_the_longest_request_alone_is_never_preempted(
    windows: dict[int, int | None], tier: Tier
) -> None:
    """What admission lets in holds no more pages than there are, in every group of layers."""
    config = config_of(windows, 40)
    longest = config.longest_context if tier is PLAIN else LAST // 2
    longest = min(longest, 3000)
    check_request(sequence(longest - 50, tier, max_tokens=51).request, config)
    plan = Scheduler(config)
    one = sequence(longest - 50, tier)
    plan.add(one)
    most = 0
    while one.num_computed < longest:
        step(plan, config.page_groups.windows)
        assert one.is_running
        most = max(most, plan.pool.num_used)
    plan.check_integrity()
    assert most <= config.num_pages
    plan.remove(one)
    assert plan.pool.num_used == 0


def test_a_longer_request_is_refused_with_the_pages_that_it_needs() -> None:
    """The message has pages of layers, because positions alone do not decide."""
    config = config_of(GEMMA, 40)
    assert config.longest_context > 2 * config.capacity
    check_request(sequence(config.longest_context, max_tokens=1).request, config)
    with pytest.raises(CacheCapacityError, match=r"take 241 pages of layers, the KV cache has 240"):
        check_request(sequence(config.longest_context + 1, max_tokens=1).request, config)
    small = config_of(MIXED, 10)
    with pytest.raises(CacheCapacityError, match="pages of layers"):
        check_request(sequence(900, SINKS).request, small)
    assert config_of(dict.fromkeys(range(4), 24), 40).longest_context == ENDLESS


def test_sinks_release_the_pages_of_every_group() -> None:
    """With three groups without a window and one with one, all stay bounded."""
    windows = grouped(MIXED).windows
    assert windows == (None, None, None, 24)
    plan = Scheduler(config_of(MIXED, 40))
    one = sequence(1000, SINKS)
    plan.add(one)
    held = []
    for _ in range(400):
        step(plan, windows)
        held.append([sum(page != HOLE for page in one.pages[group::4]) for group in range(4)])
    assert one.num_computed > 1000
    assert all(num <= 2 + 60 // PAGE + 2 for num in held[-1][:3])
    assert held[-1][3] <= 24 // PAGE + 2


def test_many_sequences_share_a_cache_without_end() -> None:
    """Starts, shared beginnings and preemptions at random; nothing is lost, and all end."""
    chance = random.Random(1)
    windows = grouped(GEMMA).windows
    plan = Scheduler(config_of(GEMMA, 40))
    sequences = [sequence(chance.randrange(1, 200), salt=str(at % 3)) for at in range(12)]
    for each in sequences:
        plan.add(each)
    for _ in range(3000):
        step(plan, windows)
        if chance.random() < 0.02:
            plan.make_room()
        plan.check_integrity()
        for each in [each for each in plan.running if len(each.token_ids) > 260]:
            plan.remove(each)
        if not plan.running and not plan.waiting:
            break
    assert not plan.waiting
    assert not plan.running
    assert plan.pool.num_used == 0


def test_a_reservation_does_not_count_on_shared_pages_of_a_window() -> None:
    """Pages that another sequence holds, too, are not free when this one lets them go."""
    config = config_of(GEMMA, 200)
    windows = grouped(GEMMA).windows
    plan = Scheduler(config)
    first = sequence(101)
    plan.add(first)
    while first.num_computed < 101:
        step(plan, windows)
    second = Sequence(sequence(400).request)
    keys = plan.pages.reusable_keys(second)
    found = plan.pages.reusable_pages(keys)
    assert len(found) == 25 * 6
    plan.pages.reuse_prefix(second)
    shared = [page for page in second.pages if page != HOLE]
    assert all(plan.pool.ref_counts[page] == 2 for page in shared)
    most = (24 + CHUNK) // PAGE + 2
    assert plan.pages.num_to_hold(second) == 75 + 5 * most
    plan.remove(first)
    assert plan.pages.num_to_hold(second) == 75 + 5 * (most - 24 // PAGE)


def test_pages_are_evicted_from_the_end_in_all_groups_alike() -> None:
    """The last positions go first, of every group, so that the beginning stays of use.

    A group with a window needs the last pages before a hit. If one of them is evicted, and no
    earlier window is known, then nothing of the prompt is reused.
    """
    plan = Scheduler(config_of(MIXED, 40))
    windows = grouped(MIXED).windows
    one = sequence(41)
    plan.add(one)
    while one.num_computed < 41:
        step(plan, windows)
    plan.remove(one)
    assert plan.pool.num_cached == 40
    cached = list(plan.pool._cached)
    keys = one.page_keys(10, PAGE)
    known = plan.pages.index.published()
    order = {known[group_key(key, group)]: at for at, key in enumerate(keys) for group in range(3)}
    positions = [order[page] for page in cached if page in order]
    assert positions == sorted(positions, reverse=True)


@given(
    known=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12),
    windows=st.lists(st.sampled_from([None, 1, 2, 5, 9, 24]), min_size=3, max_size=3),
)
def test_a_prefix_hit_has_what_the_next_query_reads(
    known: list[tuple[bool, bool, bool]], windows: list[int | None]
) -> None:
    """The longest prefix, found by trying every length."""
    index, keys = PrefixIndex(), [bytes((at,)) * 32 for at in range(len(known))]
    for at, row in enumerate(known):
        for group, has_page in enumerate(row):
            if has_page:
                index.publish(at * 3 + group, group_key(keys[at], group))

    def read(num: int, window: int | None) -> set[int]:
        first = 0 if window is None else max(0, num * PAGE - window + 1)
        return {position // PAGE for position in range(first, num * PAGE)}

    fitting = [
        num
        for num in range(len(known) + 1)
        if all(known[at][group] for group in range(3) for at in read(num, windows[group]))
    ]
    found = index.match_groups(keys, windows, PAGE, HOLE)
    assert len(found) == 3 * max(fitting)
    for group in range(3):
        wanted = read(max(fitting), windows[group])
        pages = found[group::3]
        assert {at for at, page in enumerate(pages) if page != HOLE} == wanted
        assert all(pages[at] == at * 3 + group for at in wanted)


@given(
    num_pages=st.integers(0, 200), windows=st.lists(st.sampled_from([None, 3, 8, 40]), min_size=1)
)
def test_the_longest_sequence_is_the_last_that_fits(
    num_pages: int, windows: list[int | None]
) -> None:
    """Compared with every length."""
    groups = PageGroups(tuple((at,) for at in range(len(windows))), tuple(windows))
    longest = groups.longest(num_pages, PAGE, CHUNK)
    fits = [groups.num_held(at, PAGE, CHUNK) <= num_pages for at in range(num_pages + 2)]
    if None not in windows and all(fits):
        assert longest == ENDLESS
    else:
        assert longest == (fits.index(False) - 1) * PAGE
