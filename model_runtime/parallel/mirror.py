"""Rank 0's runner: every step is sent to the followers before it runs here.

Shapes: R = rows of logits, V = vocabulary, S = sequences.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from model_runtime.batch import Span
from model_runtime.parallel.followers import Followers
from model_runtime.parallel.group import Group, RanksApartError
from model_runtime.parallel.wire import Kind, json_bytes, pack_spans, profile_values
from model_runtime.runner.cuda_graphs import Recorder
from model_runtime.runner.model_runner import ModelRunner
from rope import Profile


class MirroredRunner(ModelRunner):
    """A model runner whose followers run every step, too."""

    def __init__(self, followers: Followers, group: Group, *parts: Any) -> None:
        """Let the followers build the same runner, in place of any they have.

        `parts`: the arguments of `ModelRunner`.
        """
        super().__init__(*parts)
        store, tables = self._store, self._tables
        self._followers = followers
        self._group = group
        self._known = set(tables.profiles)
        self._is_apart = False
        followers.send(
            Kind.BUILD,
            json_bytes(
                {
                    "num_pages": store.num_pages,
                    "page_size": self._page_size,
                    "max_len": tables.max_len,
                    "room": tables.room,
                    "profiles": [profile_values(each) for each in tables.profiles],
                }
            ),
        )

    def table_id(self, profile: Profile) -> int:
        """Return the id of the rotation table, which is the same on every rank."""
        if profile not in self._known:
            self._followers.send(Kind.TABLE, json_bytes(profile_values(profile)))
            table_id = super().table_id(profile)
            self._known.add(profile)  # last: after an error both sides try again
            return table_id
        return super().table_id(profile)

    @torch.inference_mode()
    def prepare(self, spans: Sequence[Span], token_S: Tensor | None = None) -> Callable[[], Tensor]:
        """Send the step, then build it here; any error of it leaves the ranks apart."""
        kind = Kind.STEP if token_S is None else Kind.FOLLOWING_STEP
        try:
            self._followers.send(kind, pack_spans(spans))
            if token_S is not None:
                self._group.share_from_first(token_S)
            forward = super().prepare(spans, token_S)
        except BaseException:
            self._is_apart = True
            raise

        def run() -> Tensor:
            try:
                return forward()
            except BaseException:
                self._is_apart = True
                raise

        return run

    def capture_graphs(
        self, max_len: int, max_rows: int, spare_page: int, record: Recorder
    ) -> None:
        """Capture decode steps on every rank; the gathers in them run while they are captured."""
        limits = {"max_len": max_len, "max_rows": max_rows, "spare_page": spare_page}
        self._followers.send(Kind.CAPTURE, json_bytes(limits))
        super().capture_graphs(max_len, max_rows, spare_page, record)

    def check_device(self) -> None:
        """Wait for the device. Raises if it no longer works, or if the ranks are apart."""
        if self._is_apart:
            fault = self._followers.wait_for_fault(0.5)
            raise RanksApartError(fault or "a step failed on rank 0 after its followers began it")
        super().check_device()
