"""Answers and their bits do not depend on what the disk has, and pages outlive the engine."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ropewalk.model_runtime.deployments.deployment import RopeRequest
from ropewalk.model_runtime.engine.kv_disk import writer
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.waiting import wait_until
from tests.model_runtime.engine.kv_disk.disk_engines import (
    NUM_PAGES,
    PROMPT,
    Server,
    files,
    with_weights,
)

YARN = {"rope_type": "yarn", "factor": 8.0}


@pytest.fixture
def checkpoint(llama_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    return with_weights(llama_checkpoint, tmp_path / "model")


def test_answers_are_equal_to_the_bit_cold_warm_and_half_deleted(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """An engine without a disk gives the expected bits; each start has an empty cache."""
    deployment = deployment_of(checkpoint, rope_scaling=YARN)
    asked = request(deployment, PROMPT, max_tokens=40, logprobs=4)
    expected = answer(engines.over(checkpoint), asked)[0]
    folder = tmp_path / "kv"
    found = []
    for number in range(4):
        server = Server(engines, checkpoint, folder)
        result, num_cached = server.ask(replace(asked, request_id=f"again-{number}"))
        assert result == expected
        found.append(num_cached)
        server.stop()
        assert server.disk.sum.num_tokens_read == num_cached
        if number == 1:  # the last half of the prefix
            assert len(files(folder)) == 14  # and two pages of the answer
            for path in files(folder)[5:]:
                path.unlink()
        if number == 2:  # the first page only: nothing after it can be used
            files(folder)[0].unlink()
    assert found == [0, NUM_PAGES * 16, 5 * 16, 0]


def test_a_longer_prompt_reads_the_pages_of_a_shorter_one_and_writes_its_own(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Pages of answers are kept, too, as a conversation's next turn needs them."""
    deployment = deployment_of(checkpoint, rope_scaling=YARN)
    wide = RopeRequest(factor=8.0, policy="fixed")
    server = Server(engines, checkpoint, tmp_path / "kv")
    result, _ = server.ask(request(deployment, PROMPT, wide, max_tokens=40))
    server.stop()
    assert server.pages == {"written": 14}
    turn = [*PROMPT, *result.token_ids, *range(30)]
    server = Server(engines, checkpoint, tmp_path / "kv")
    _, num_cached = server.ask(request(deployment, turn, wide, max_tokens=1))
    server.stop()
    assert num_cached == 14 * 16
    assert server.pages == {"read": 14, "written": 2}


Change = Callable[[Checkpoint, Path], tuple[Checkpoint, dict[str, Any]]]


def other_weights(checkpoint: Checkpoint, folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Weights of the same name and size, in place of the others."""
    return with_weights(checkpoint, folder, b"wEights"), {}


def other_products(checkpoint: Checkpoint, folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Another arithmetic."""
    return replace(checkpoint, products="by hand"), {}


def other_pages(checkpoint: Checkpoint, folder: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """Pages of half the size."""
    return checkpoint, {"page_size": 8}


@pytest.mark.parametrize("change", [other_weights, other_products, other_pages])
def test_pages_of_another_identity_are_not_found(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path, change: Change
) -> None:
    """They stay in the folder, because a server of that identity may come back."""
    deployment = deployment_of(checkpoint)
    folder = tmp_path / "kv"
    short = PROMPT[:60]
    server = Server(engines, checkpoint, folder)
    server.ask(request(deployment, short, max_tokens=1))
    server.stop()
    before = files(folder)
    assert len(before) == 3
    changed, config = change(checkpoint, tmp_path / "model")
    server = Server(engines, changed, folder, **config)
    assert server.ask(request(deployment, short, max_tokens=1))[1] == 0
    server.stop()
    assert "read" not in server.pages
    assert set(before) < set(files(folder))


def test_another_profile_or_salt_finds_nothing(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The key of a page hashes both."""
    deployment = deployment_of(checkpoint, rope_scaling=YARN)
    wide = RopeRequest(factor=8.0, policy="fixed")
    server = Server(engines, checkpoint, tmp_path / "kv")
    server.ask(request(deployment, PROMPT, wide, max_tokens=1))
    server.stop()
    server = Server(engines, checkpoint, tmp_path / "kv")
    others = [
        request(deployment, PROMPT, RopeRequest(factor=4.0, policy="fixed"), max_tokens=1),
        request(deployment, PROMPT, wide, "salt", max_tokens=1),
        request(deployment, [9, *PROMPT], wide, max_tokens=1),
    ]
    assert [server.ask(each)[1] for each in others] == [0, 0, 0]
    assert server.ask(request(deployment, PROMPT, wide, max_tokens=1))[1] == NUM_PAGES * 16
    server.stop()


def test_the_files_of_pages_in_use_stay_the_newest(
    engines: EngineFactory,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefix that is found in memory is no longer the first one to be deleted."""
    monkeypatch.setattr(writer, "_TOUCH_S", 0.0)
    folder = tmp_path / "kv"
    deployment = deployment_of(checkpoint)
    server = Server(engines, checkpoint, folder)
    server.ask(request(deployment, PROMPT, max_tokens=1))
    wait_until(lambda: len(files(folder)) == NUM_PAGES)
    in_use = files(folder)
    server.ask(request(deployment, PROMPT[1:], max_tokens=1))
    wait_until(lambda: len(files(folder)) == 2 * NUM_PAGES)
    for age, path in enumerate(in_use, 5000):
        os.utime(path, (time.time() - age, time.time() - age))
    server.ask(request(deployment, PROMPT, max_tokens=1))
    wait_until(lambda: all(path.stat().st_mtime > time.time() - 1000 for path in in_use))
    server.stop()
    assert [path for path in files(folder) if path in in_use] == in_use  # the last pages go first


def test_many_requests_at_once_share_a_read_and_answer_as_without_a_disk(
    engines: EngineFactory, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Some find all of their pages, some a part and some none; the cache holds a few of them."""
    deployment = deployment_of(checkpoint, rope_scaling=YARN)
    prompts = [PROMPT, PROMPT[:130], PROMPT[:100] + PROMPT[:60], PROMPT[50:], PROMPT, [5] * 70]
    asked = [request(deployment, each, max_tokens=12, logprobs=2) for each in prompts]
    limits = {"kv_cache_tokens": 640, "max_model_len": 256, "max_num_batched_tokens": 48}
    expected = answer(engines.over(checkpoint, **limits), *asked)
    folder = tmp_path / "kv"
    for number in range(3):
        server = Server(engines, checkpoint, folder, **limits)
        again = [replace(each, request_id=f"{each.request_id}-{number}") for each in asked]
        assert answer(server.engine, *again) == expected
        server.engine._core.check_integrity()
        server.stop()
        if number == 1:
            assert server.pages["read"] > 20
            for path in files(folder)[::2]:
                path.unlink()
    shutil.rmtree(folder)
