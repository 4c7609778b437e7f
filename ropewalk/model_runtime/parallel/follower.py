"""The process of a rank after the first: it loads its share of a model and mirrors rank 0's steps.

It has no scheduler, no sampler and no clock: rank 0 says what to run, and the logits are dropped.
An error here ends the process, because a step cannot be repeated on one rank alone.
"""

import json
import logging
import os
import signal
import socket
import sys
from typing import Any

import structlog
import torch

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.rope_tables import RopeTables
from ropewalk.model_runtime.child_process import end_with_parent
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import read_model_config
from ropewalk.model_runtime.page_groups import PageGroups
from ropewalk.model_runtime.parallel.division import ColumnDivision
from ropewalk.model_runtime.parallel.group import Group
from ropewalk.model_runtime.parallel.plan import plan_of
from ropewalk.model_runtime.parallel.wire import Kind, Link, SpanUnpacker, profile_of
from ropewalk.model_runtime.runner.backends import new_store
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits, cuda_recorder
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from ropewalk.model_runtime.transfer import make_current

_DIED = 1


class Follower:
    """The state of one rank: its group, its model and its runner."""

    def __init__(self) -> None:
        self._group: Group | None = None
        self._checkpoint: Checkpoint | None = None
        self._runner: ModelRunner | None = None
        self._unpacker = SpanUnpacker()

    @property
    def group(self) -> Group:
        assert self._group is not None
        return self._group

    @property
    def checkpoint(self) -> Checkpoint:
        assert self._checkpoint is not None
        return self._checkpoint

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None
        return self._runner

    def follow(self, kind: Kind, content: bytes) -> None:
        """Do what a message says."""
        if kind is Kind.STEP:
            self._step(content)
            return
        values = json.loads(content)
        if kind is Kind.JOIN:
            self._join(values)
        elif kind is Kind.LOAD:
            self._load(values)
        elif kind is Kind.BUILD:
            self._build(values)
        elif kind is Kind.TABLE:
            self.runner.table_id(profile_of(values))
        elif kind is Kind.CAPTURE:
            limits = CaptureLimits(**values)
            self.runner.capture_graphs(limits, cuda_recorder(self.checkpoint.device))

    def _join(self, values: Any) -> None:
        torch.set_num_threads(values["num_threads"])
        device = torch.device(values["device"])
        make_current(device)
        self._group = Group(values["rank"], values["size"], values["store"], device)

    def _load(self, values: Any) -> None:
        self._runner = self._checkpoint = None  # the memory of another model
        outline = read_model_config(**values)
        plan = plan_of(outline, self.group.size)
        self._checkpoint = load_checkpoint(**values, division=ColumnDivision(plan, self.group))

    def _build(self, values: Any) -> None:
        self._runner = None  # the memory of another cache
        checkpoint, page_size = self.checkpoint, values["page_size"]
        groups = values["groups"]
        groups = PageGroups(tuple(map(tuple, groups["layers"])), tuple(groups["windows"]))
        layout = CacheLayout(checkpoint.plans, checkpoint.dtype, page_size, groups=groups)
        store = new_store(layout, values["num_pages"], checkpoint.device)
        tables = RopeTables(
            checkpoint.native, page_size, values["max_len"], checkpoint.device, values["room"]
        )
        for each in values["profiles"]:
            tables.id_of(profile_of(each))
        self._unpacker = SpanUnpacker()
        parts = (checkpoint.model, checkpoint.plans, store, tables, page_size)
        self._runner = ModelRunner(*parts, is_one_of_ranks=True)

    @torch.inference_mode()
    def _step(self, content: bytes) -> None:
        spans, num_unknown = self._unpacker.unpack(content)
        token_U = None  # the first tokens, of which only rank 0's device knows
        if num_unknown:
            token_U = torch.zeros(num_unknown, dtype=torch.int64, device=self.checkpoint.device)
            self.group.share_from_first(token_U)
        self.runner.prepare(spans, token_U)()


def main() -> None:
    """Follow the process that has started this one, and end with it."""
    end, parent = (int(each) for each in sys.argv[1:3])
    _end_with(parent)
    # A terminal and a service manager signal all processes at once, but rank 0 still drains.
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    link, follower = Link(socket.socket(fileno=end)), Follower()
    code = 0
    try:
        while (message := link.receive()) is not None:
            # Rank 0's own numbers of ranks are in order of its messages.
            follower.follow(*message)
    except Exception as error:  # noqa: BLE001  # whatever it is, rank 0 must hear of it
        if not link.is_closed():  # else rank 0 has ended, which is the reason
            code = _DIED
            link.tell_fault(error)
    sys.stderr.flush()
    os._exit(code)  # torch's destructors may wait for the other ranks


def _end_with(parent: int) -> None:
    """Let the system kill this process when `parent` ends, where it can."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(0)
