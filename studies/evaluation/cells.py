"""Cells, the units of measurement: one quantity at one length under one table.

Variants share a cell if their requests at a length have equal profiles. Equal profiles rotate
identically to the bit, so they are not measured twice.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ropewalk.model_runtime.deployments.deployment import Deployment, Placement, RopeRequest
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.request import FinishReason, Output, Request, SamplingParams
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.haystack import Haystack, HaystackError, Query
from ropewalk.studies.evaluation.plan import LengthPlan, Variant
from ropewalk.studies.evaluation.texts import LengthWindow, Texts
from ropewalk.studies.harness.eval_run import EvalError, key_of
from ropewalk.studies.harness.progress import Progress
from ropewalk.studies.ruler.make import make_samples
from ropewalk.studies.ruler.qa import QuestionSet
from ropewalk.studies.ruler.sample import Sample, SampleScore
from ropewalk.studies.ruler.score import metric_of

PERPLEXITY, RETRIEVAL = "perplexity", "retrieval"
TOGETHER = 4  # requests in the engine at the same time


@dataclass(frozen=True, slots=True)
class WindowScore:
    """The score of one window's targets."""

    source: str
    nats: float  # sum of -ln p
    target_tokens: int
    target_bytes: int


@dataclass(frozen=True, slots=True)
class QueryScore:
    """The result of one question."""

    form: str
    depth: float  # of the requested needle, 0 to 1
    position: int  # of its first token
    is_right: bool
    answer: str


Score = WindowScore | QueryScore | SampleScore


@dataclass(frozen=True, slots=True)
class Task:
    """One request, and the scoring of its answer."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    of: LengthWindow | Query | Sample

    def score(self, outputs: Sequence[Output]) -> Score:
        """Return the score. Raises EvalError if the engine answered with an error."""
        if outputs[-1].finish_reason is FinishReason.ERROR:
            raise EvalError(f"a request failed in the engine: {outputs[-1].error}")
        if isinstance(self.of, LengthWindow):
            entries = [each for out in outputs for each in out.prompt_logprobs if each is not None]
            nats = -math.fsum(each.logprob for each in entries)
            return WindowScore(self.of.source, nats, len(entries), self.of.target_bytes)
        text = "".join(each.text for each in outputs)
        if isinstance(self.of, Sample):
            share = metric_of(self.of.task)(text, self.of.draft.outputs)
            return SampleScore(self.of.index, share, text)
        form, is_right = self.of.needle.form.name, self.of.is_answered_by(text)
        return QueryScore(form, self.of.depth, self.of.position, is_right, text)


@dataclass(frozen=True, slots=True)
class LengthCell:
    """Requests of one kind, length and profile."""

    kind: str
    context_len: int
    placement: Placement
    tasks: tuple[Task, ...]

    @property
    def size(self) -> int:
        """Return the number of tokens in all prompts."""
        return sum(len(task.prompt_ids) for task in self.tasks)

    @property
    def label(self) -> str:
        """Return a label, for example `retrieval, 1024 tokens, yarn x4`."""
        profile = self.placement.tier.profile
        logn = "+logn" if profile.logn_len is not None else ""
        table = f"{profile.name}{logn} x{self.placement.tier.factor:g}"
        if self.placement.lower_tiers:
            table += " by position"
        return f"{self.kind}, {self.context_len} tokens, {table}"

    def in_words(self) -> dict[str, object]:
        """Return what a reader of the record wants to know."""
        profile = repr(tables_of(self.placement))
        return {"kind": self.kind, "context_len": self.context_len, "profile": profile}

    def key(self, model_digest: str) -> str:
        """Return a key that is equal only for equal requests, model and table."""
        tables = tables_of(self.placement)
        return key_of(model_digest, self.kind, self.context_len, tables, self.tasks)


_At = tuple[str, int, object]  # kind, length, tables


def tables_of(placement: Placement) -> object:
    """Return what decides on a prompt's tables: its profile, or the ends of those below it, too."""
    profile = placement.tier.profile
    lower = tuple((each.ceiling, each.profile) for each in placement.lower_tiers)
    return (*lower, profile) if lower else profile


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells, and the cells by kind that the numbers of a variant at a length come from."""

    cells: Mapping[_At, LengthCell]
    of_variant: Mapping[tuple[Variant, int], Mapping[str, _At]]


def make_grid(
    *,
    plan: LengthPlan,
    deployments: Mapping[Variant, Deployment],
    texts: Texts,
    windows: Sequence[LengthWindow],
    haystacks: Sequence[Haystack],
    question_sets: Mapping[str, QuestionSet],
    tokenizer: Tokenizer,
) -> Grid:
    """Build the grid, shortest lengths first for early results. Raises EvalError."""
    cells: dict[_At, LengthCell] = {}
    of_variant: dict[tuple[Variant, int], dict[str, _At]] = defaultdict(dict)
    samples_of = partial(
        make_samples,
        count=plan.num_samples,
        seed=plan.seed,
        essay=texts.words() if plan.tasks else (),
        question_sets=question_sets,
        encode=partial(tokenizer.encode, add_special_tokens=False, param="--tasks"),
        special_ids=texts.special_ids,
    )
    for context_len in plan.context_lens:
        tasks = {
            PERPLEXITY: tuple(_window_task(each, context_len, texts, plan) for each in windows),
            RETRIEVAL: tuple(map(_query_task, _queries(haystacks, context_len, tokenizer)))[
                : plan.num_queries
            ],
            **{
                task: tuple(map(_sample_task, samples_of(task, context_len=context_len)))
                for task in plan.tasks
            },
        }
        for (kind, of_kind), variant in itertools.product(tasks.items(), plan.variants):
            if not of_kind:
                continue
            untouched = variant.policy is None and not plan.carries_scaling
            placement = _place(deployments[variant], of_kind[0], untouched=untouched)
            at = (kind, context_len, tables_of(placement))
            cells.setdefault(at, LengthCell(kind, context_len, placement, of_kind))
            of_variant[variant, context_len][kind] = at
    return Grid(cells, of_variant)


def measure(engine: Engine, cell: LengthCell, progress: Progress) -> list[Score]:
    """Send a cell's requests to the engine. The progress advances by prompt tokens."""
    scores: list[Score] = []
    for first in range(0, len(cell.tasks), TOGETHER):
        tasks = cell.tasks[first : first + TOGETHER]
        requests = [
            Request(f"{cell.kind}-{first + at}", task.prompt_ids, task.sampling, cell.placement)
            for at, task in enumerate(tasks)
        ]
        answers = engine.generate(requests)
        scores += [task.score(outputs) for task, outputs in zip(tasks, answers, strict=True)]
        progress.advance(sum(len(task.prompt_ids) for task in tasks), cell.label)
    return scores


def _window_task(window: LengthWindow, context_len: int, texts: Texts, plan: LengthPlan) -> Task:
    prompt_ids = window.prompt(context_len, texts.special_ids)
    first = context_len - plan.target_tokens
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=first)
    return Task(prompt_ids, sampling, window)


def _queries(haystacks: Sequence[Haystack], context_len: int, tokenizer: Tokenizer) -> list[Query]:
    """Return the questions of all haystacks. Raises EvalError."""
    try:
        return [query for each in haystacks for query in each.queries(context_len, tokenizer)]
    except HaystackError as error:
        raise EvalError(f"--context-lens: {error}") from error


def _query_task(query: Query) -> Task:
    # The rest of the line after the value is not needed.
    sampling = SamplingParams(max_tokens=query.max_tokens, temperature=0.0, stop=("\n",))
    return Task(query.prompt_ids, sampling, query)


def _sample_task(sample: Sample) -> Task:
    return Task(
        sample.prompt_ids, SamplingParams(max_tokens=sample.max_tokens, temperature=0.0), sample
    )


def _place(deployment: Deployment, task: Task, *, untouched: bool) -> Placement:
    asked = RopeRequest(rope_type="default") if untouched else RopeRequest()
    placement = deployment.place(asked, len(task.prompt_ids), task.sampling.max_tokens)
    # The cell keeps only the deployment's table.
    return replace(placement, deployment="eval", requested_factor=None)
