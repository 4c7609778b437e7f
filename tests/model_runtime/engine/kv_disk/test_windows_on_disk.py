"""Pages of groups of layers outlive the engine; a start reads those that its windows see."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.page_groups import ONE_GROUP, PageGroups
from ropewalk.model_runtime.scheduling.prefix_cache import PrefixIndex, group_key
from ropewalk.model_runtime.scheduling.read_plan import (
    pages_before,
    stored_key,
    wanted_pages,
)
from tests.doubles.engines import (
    EngineFactory,
    answer,
    deployment_of,
    groups_of,
    request,
    tiny_checkpoint,
)
from tests.model_runtime.engine.kv_disk.disk_engines import PROMPT, Server, files, with_weights

# Layers of both kinds, and of one.
CASES = [
    ("gemma3_text", "auto"),
    ("gemma3_text", "fixed8"),
    ("gemma3_text", "int4"),
    ("mistral", "k8v4"),
]
PAGE, WINDOW = 32, 40
YARN = {"rope_type": "yarn", "factor": 4.0}
SECRET = 1234.5
LIMITS: dict[str, Any] = {"page_size": PAGE, "kv_cache_tokens": 2048, "max_model_len": 256}


@cache
def windowed(name: str) -> Checkpoint:
    """A taken-over tiny model with windows of 40 keys."""
    return tiny_checkpoint(name, sliding_window=WINDOW)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_answers_are_equal_to_the_bit_cold_warm_and_half_deleted(
    engines: EngineFactory, tmp_path: Path, name: str, kind: str
) -> None:
    """An engine over pages of all layers, without a disk, gives the expected bits."""
    checkpoint = with_weights(windowed(name), tmp_path / "model")
    limits = {**LIMITS, "kv_cache_dtype": kind}
    asked = request(deployment_of(checkpoint), PROMPT, max_tokens=40, logprobs=4)
    expected = answer(engines.over(checkpoint, **limits), asked)[0]
    groups, folder, found, num_read = groups_of(checkpoint), tmp_path / "kv", [], []
    rng = random.Random(7)
    for number in range(6):
        server = Server(engines, checkpoint, folder, page_groups=groups, **limits)
        result, num_cached = server.ask(replace(asked, request_id=f"again-{number}"))
        server.stop()
        assert result == expected
        assert server.disk.sum.num_tokens_read == num_cached
        found.append(num_cached)
        num_read.append(server.pages.get("read", 0))
        if number == 0:
            assert len(files(folder)) == 7 * groups.num_groups
        if number >= 2:
            for path in rng.sample(files(folder), 1 + len(files(folder)) // 8):
                path.unlink()
    assert found[:3] == [0, 192, 192]
    # The 40 keys of a window before position 192 lie in the last two pages.
    assert num_read[1] == 6 * groups.windows.count(None) + 2 * sum(map(bool, groups.windows))
    assert all(each % PAGE == 0 for each in found)


def test_a_shorter_prompt_finds_the_windows_before_its_end(
    engines: EngineFactory, tmp_path: Path
) -> None:
    """Every page of a group with a window was written, also those given back long before."""
    checkpoint = with_weights(windowed("gemma3_text"), tmp_path / "model")
    groups = groups_of(checkpoint)
    deployment = deployment_of(checkpoint, rope_scaling=YARN, rope_policy="fixed")
    limits = {**LIMITS, "page_groups": groups, "max_num_batched_tokens": 16}
    server = Server(engines, checkpoint, tmp_path / "kv", **limits)
    server.ask(request(deployment, PROMPT, max_tokens=1))
    server.stop()
    for num, expected in ((100, 96), (70, 64), (200, 192)):
        server = Server(engines, checkpoint, tmp_path / "kv", **limits)
        asked = request(deployment, PROMPT[:num], max_tokens=5, logprobs=2)
        result, num_cached = server.ask(asked)
        server.stop()
        assert num_cached == expected
        assert result == answer(engines.over(checkpoint, **LIMITS), asked)[0]


def test_pages_of_other_groups_are_not_found(engines: EngineFactory, tmp_path: Path) -> None:
    """A page of all layers and one of a group have other identities."""
    checkpoint = with_weights(windowed("gemma3_text"), tmp_path / "model")
    asked = request(deployment_of(checkpoint), PROMPT, max_tokens=1)
    for groups in (groups_of(checkpoint), ONE_GROUP):
        server = Server(engines, checkpoint, tmp_path / "kv", page_groups=groups, **LIMITS)
        assert server.ask(asked)[1] == 0
        server.stop()
    assert len(list((tmp_path / "kv" / "v1").iterdir())) == 2


@given(
    windows=st.lists(st.sampled_from([None, 1, 8, 20, 60]), min_size=1, max_size=4),
    num_pages=st.integers(1, 9),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.3, 0.8, 0.95]),
)
def test_a_read_reaches_the_longest_prefix_that_is_there(
    windows: list[int | None], num_pages: int, seed: int, share: float
) -> None:
    """In cache and store together, as the index finds it."""
    rng, size = random.Random(seed), 8
    keys = [bytes([at]) * 32 for at in range(num_pages)]
    every = [group_key(key, group) for key in keys for group in range(len(windows))]
    stored = {key for key in every if rng.random() < share}
    cached = {key for key in every if rng.random() < 0.3}

    def num_found(known: set[bytes]) -> int:
        index = PrefixIndex()
        for page, key in enumerate(sorted(known)):
            index.publish(page, key)
        return len(index.match_groups(keys, windows, size, -1)) // len(windows)

    first, asked = num_found(cached), []
    plan = wanted_pages(keys, first, windows, size, set(cached))
    key = next(plan, None)
    while key is not None:
        asked.append(key)
        try:
            key = plan.send(key in stored)
        except StopIteration:
            break
    assert len(set(asked)) == len(asked)
    assert not cached & set(asked)
    reached = num_found(cached | (stored & set(asked)))
    assert reached == num_found(cached | stored) >= first
    if set(every) <= stored:
        assert set(asked) == set(pages_before(keys, num_pages, windows, size)) - cached
    assert len({stored_key(key) for key in every}) == len(every)


@pytest.mark.parametrize(("windows", "most"), [((512,), 65), ((None, 512, 64), 64)])
def test_a_store_without_windows_is_asked_once_a_window(
    windows: tuple[int | None, ...], most: int
) -> None:
    """A cold prompt of 32,768 tokens has 512 pages; a page without a window is there."""
    keys = [number.to_bytes(32, "big") for number in range(512)]
    plan, num_missed = wanted_pages(keys, 0, windows, 64, set()), 0
    key = next(plan, None)
    while key is not None:
        is_there = windows[0] is None and len(key) == 32
        num_missed += not is_there
        try:
            key = plan.send(is_there)
        except StopIteration:
            break
    assert 0 < num_missed <= most


def test_files_hold_nothing_of_others_in_places_without_a_layer(
    engines: EngineFactory, tmp_path: Path
) -> None:
    """The cache held numbers of another prompt there, which stay in the memory of the server."""
    checkpoint = with_weights(windowed("gemma3_text"), tmp_path / "model")
    own = groups_of(checkpoint)
    layers = sorted(index for each in own.layers for index in each)
    groups = PageGroups((tuple(layers[:-1]), tuple(layers[-1:])), (None, None))
    assert len(layers) > 2
    server = Server(engines, checkpoint, tmp_path / "kv", page_groups=groups, **LIMITS)
    tensors = server.engine._core._runner.store.page_memory()
    for tensor in tensors[2:]:
        tensor.view(np.float32)[:] = SECRET
    asked = request(deployment_of(checkpoint), PROMPT, max_tokens=1)
    server.ask(asked)
    server.stop()
    size = sum(each.shape[1] for each in tensors[:2])
    found = [
        np.fromfile(path, np.float32)[-len(tensors) * size // 8 :]
        for path in files(tmp_path / "kv")
    ]
    assert len(found) == 12
    assert not any((each == SECRET).any() for each in found)
    assert sum(not each[size // 4 :].any() for each in found) == 6
