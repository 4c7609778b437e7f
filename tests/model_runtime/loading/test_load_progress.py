"""The progress of a load is log lines, unless a person watches a terminal."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from transformers.utils import logging as transformers_logging

from ropewalk.model_runtime.loading import load_progress
from ropewalk.model_runtime.loading.load_progress import logged_progress

Counted = dict[str, Any]


def counted(run: Callable[[], object]) -> list[Counted]:
    """Return the log's progress lines of a function."""
    with structlog.testing.capture_logs() as lines, logged_progress():
        run()
    assert all(line["event"] == "load_progress" for line in lines)
    return [{key: line[key] for key in ("what", "done", "total")} for line in lines]


def test_iterating_is_one_line_at_the_end() -> None:
    """A short load has no line in between."""
    lines = counted(lambda: list(transformers_logging.tqdm(range(3), desc="Loading weights")))
    assert lines == [{"what": "Loading weights", "done": 3, "total": 3}]


def test_a_long_load_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval is five seconds, here none."""
    monkeypatch.setattr(load_progress, "_INTERVAL_S", 0.0)
    lines = counted(lambda: list(transformers_logging.tqdm({"a": 1, "b": 2}.items(), desc="X")))
    assert [line["done"] for line in lines] == [1, 2, 2]


def test_a_bar_that_is_updated_by_hand_is_counted() -> None:
    """transformers also uses bars as context managers, with a total and a description to set."""

    def by_hand() -> None:
        with transformers_logging.tqdm(total=10, desc="Downloading") as bar:
            bar.update(4)
            bar.set_description("unused")
            bar.update(6)

    assert counted(by_hand) == [{"what": "Downloading", "done": 10, "total": 10}]


def test_a_terminal_keeps_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is absent on a terminal, and after every load."""
    assert transformers_logging._tqdm_hook is None
    with logged_progress():
        assert transformers_logging._tqdm_hook is not None
    assert transformers_logging._tqdm_hook is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with logged_progress():
        assert transformers_logging._tqdm_hook is None
