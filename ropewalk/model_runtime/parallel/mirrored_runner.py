"""Rank 0's runner: every step is sent to the followers before it runs here.

Shapes: U = first tokens that only the device has.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.parallel.followers import Followers
from ropewalk.model_runtime.parallel.group import Group, RanksApartError
from ropewalk.model_runtime.parallel.wire import Kind, SpanPacker, json_bytes, profile_values
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits, Recorder
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.rope import Profile


class MirroredRunner(ModelRunner):
    """A model runner whose followers run every step, too."""

    def __init__(self, followers: Followers, group: Group, *parts: Any) -> None:
        """Let the followers build the same runner, in place of any they have.

        `parts`: the arguments of `ModelRunner`.
        """
        super().__init__(*parts, is_one_of_ranks=True)
        store, tables = self._store, self._tables
        self._followers = followers
        self._group = group
        self._known = set(tables.profiles)
        self._is_apart = False
        self._packer = SpanPacker()
        followers.send(
            Kind.BUILD,
            json_bytes(
                {
                    "num_pages": store.num_pages,
                    "page_size": self._page_size,
                    "groups": asdict(store.layout.groups),
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
    def prepare(self, spans: Sequence[Span], token_U: Tensor | None = None) -> Callable[[], Tensor]:
        """Send the step, then build it here; any error of it leaves the ranks apart."""
        num_unknown = 0 if token_U is None else len(token_U)
        try:
            self._followers.send(Kind.STEP, self._packer.pack(spans, num_unknown))
            if token_U is not None:
                self._group.share_from_first(token_U)
            forward = super().prepare(spans, token_U)
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

    def capture_graphs(self, limits: CaptureLimits, record: Recorder) -> None:
        """Capture small steps on every rank; the gathers in them run while they are captured."""
        self._followers.send(Kind.CAPTURE, json_bytes(asdict(limits)))
        super().capture_graphs(limits, record)

    def check_device(self) -> None:
        """Wait for the device. Raises if it no longer works, or if the ranks are apart."""
        if self._is_apart:
            fault = self._followers.wait_for_fault(0.5)
            raise RanksApartError(fault or "a step failed on rank 0 after its followers began it")
        super().check_device()
