"""Progress of a load, with a line per round where there is no bar."""

from server.bench.load import Failure, RequestRecord
from server.bench.plan import Group, LoadPlan
from server.study.progress import Progress


class LoadProgress:
    """A callback for each finished group, which passes the load's progress on."""

    def __init__(self, plan: LoadPlan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._num_sent = 0
        self._num_failed = 0
        progress.begin(plan.num_rounds * len(plan.context_lens))

    def __call__(self, group: Group, records: list[RequestRecord]) -> None:
        """Count the requests of a group."""
        self._progress.advance(1)
        self._num_sent += len(records)
        self._num_failed += sum(isinstance(each.outcome, Failure) for each in records)
        if group.context_len == self._plan.context_lens[-1]:
            what = "warm-up, " if group.is_warmup else ""
            self._progress.log(
                f"{what}round {group.round + 1} of {self._plan.num_rounds}: "
                f"{self._num_sent} sent, {self._num_failed} failed"
            )
