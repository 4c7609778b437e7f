"""Tokens that only a cache without prefixes would have found, against the definition."""

import random
from pathlib import Path

import pytest

from ropewalk.model_runtime.engine.kv_disk import elsewhere
from ropewalk.model_runtime.engine.kv_disk.elsewhere import Elsewhere
from ropewalk.model_runtime.loading.checkpoint import Checkpoint
from ropewalk.model_runtime.scheduling.prefix_cache import next_key
from tests.doubles.engines import EngineFactory, deployment_of, request
from tests.model_runtime.engine.kv_disk.disk_engines import Server, with_weights

PAGE = 16


class Plain:
    """The definition, with every window of every prompt kept as it is."""

    def __init__(self) -> None:
        self._windows: set[tuple[bytes, tuple[int, ...]]] = set()
        self._keys: set[bytes] = set()

    def note(self, domain: bytes, token_ids: list[int], keys: list[bytes], num_found: int) -> int:
        """Return the result of `Elsewhere.note`, if no window is left out."""
        end = len(keys) * PAGE
        num_known = 0
        while num_known < len(keys) and keys[num_known] in self._keys:
            num_known += 1
        windows = {
            at: (domain, tuple(token_ids[at : at + PAGE]))
            for at in range(max(0, num_known * PAGE - PAGE + 1), end - PAGE + 1)
        }
        covered = {
            place
            for at, window in windows.items()
            if window in self._windows
            for place in range(at, at + PAGE)
        }
        self._windows |= set(windows.values())
        self._keys |= set(keys)
        return len([each for each in covered if each >= max(num_known * PAGE, num_found)])


def keys_of(domain: bytes, token_ids: list[int]) -> list[bytes]:
    """The keys of the full pages before the last token."""
    keys = [domain]
    for at in range(0, (len(token_ids) - 1) // PAGE * PAGE, PAGE):
        keys.append(next_key(keys[-1], token_ids[at : at + PAGE]))
    return keys[1:]


@pytest.mark.parametrize("overlap", [PAGE, 8])
def test_counts_are_those_of_the_definition(overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents come in any order; if not all windows are known, a few tokens are missed."""
    monkeypatch.setattr(elsewhere, "_OVERLAP", overlap)
    for name in ("_NUM_WINDOWS", "_NUM_PAGES"):  # so large that no two entries share a place
        monkeypatch.setattr(elsewhere, name, 1 << 24)
    draw = random.Random(5)
    documents = [draw.choices(range(40_000), k=draw.randrange(70, 300)) for _ in range(12)]
    domains = [bytes([number]) * 32 for number in range(2)]
    counted, plain = Elsewhere(PAGE), Plain()
    found, expected = [], []
    for _ in range(150):
        chosen = draw.sample(documents, draw.randrange(1, 5))
        token_ids = [token for document in chosen for token in document]
        domain = draw.choice(domains)
        keys = keys_of(domain, token_ids)
        num_found = PAGE * draw.randrange(len(keys) // 2)
        expected.append(plain.note(domain, token_ids, keys, num_found))
        found.append(counted.note(domain, token_ids, keys, num_found))
    assert sum(expected) > 10_000
    if overlap == PAGE:
        assert found == expected
    else:
        assert all(mine <= most for mine, most in zip(found, expected, strict=True))
        assert sum(found) > 0.97 * sum(expected)


def test_a_prefix_that_was_evicted_does_not_count() -> None:
    """A larger cache of prefixes would have found it. Nor does a short prompt."""
    counted, domain = Elsewhere(PAGE), bytes(32)
    token_ids = list(range(500))
    keys = keys_of(domain, token_ids)
    assert [counted.note(domain, token_ids, keys, 0) for _ in range(2)] == [0, 0]
    assert counted.note(domain, token_ids[:PAGE], [], 0) == 0
    moved = [9, *token_ids]
    num_moved = counted.note(domain, moved, keys_of(domain, moved), 0)
    assert 450 < num_moved < 500
    assert counted.note(bytes([1] * 32), [8, *token_ids], keys_of(bytes([1] * 32), moved), 0) == 0


def test_memory_is_bounded_and_the_newest_prompts_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New windows replace old ones."""
    monkeypatch.setattr(elsewhere, "_NUM_WINDOWS", 256)
    monkeypatch.setattr(elsewhere, "_NUM_PAGES", 64)
    counted, domain, draw = Elsewhere(PAGE), bytes(32), random.Random(2)
    prompts = [draw.choices(range(40_000), k=1000) for _ in range(30)]
    for each in prompts:
        counted.note(domain, each, keys_of(domain, each), 0)
    assert (len(counted._windows), len(counted._pages)) == (256, 64)
    moved = [[1, *prompts[at]] for at in (0, -1)]
    first, last = (counted.note(domain, each, keys_of(domain, each), 0) for each in moved)
    assert first < 300 < last


def test_an_engine_counts_documents_in_another_order(
    engines: EngineFactory, llama_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The first document is found as a prefix, and the others are computed again and counted."""
    checkpoint = with_weights(llama_checkpoint, tmp_path / "model")
    server = Server(engines, checkpoint, tmp_path / "kv", kv_cache_tokens=64 * 16)
    draw = random.Random(4)
    first, second, third = (draw.choices(range(100), k=64) for _ in range(3))
    num_cached = [
        server.ask(request(deployment_of(checkpoint), prompt, max_tokens=1))[1]
        for prompt in ([*first, *second, *third, 1], [*first, *third, *second, 1])
    ]
    server.stop()
    assert num_cached == [0, 64]
    assert 100 < server.disk.sum.num_tokens_elsewhere <= 128
