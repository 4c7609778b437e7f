"""Cells, the units of measurement: one quantity at one length under one table.

Variants share a cell if their requests at a length have equal profiles. Equal profiles rotate
identically to the bit, so they are not measured twice.
"""

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest, TierChoice
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.request import FinishReason, Output, Request, SamplingParams
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.rope import Profile
from ropewalk.server.corpus.haystack import ChatFrame, Haystack, HaystackError, Query
from ropewalk.studies.evaluation.plan import EvalError, LengthPlan, Variant
from ropewalk.studies.evaluation.texts import LengthSource, LengthText, LengthWindow, Texts
from ropewalk.studies.harness.progress import Progress

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


Score = WindowScore | QueryScore


@dataclass(frozen=True, slots=True)
class Task:
    """One request, and the scoring of its answer."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    of: LengthWindow | LengthText | Query

    def scores(self, outputs: Sequence[Output]) -> list[Score]:
        """Return the scores; of a text those of its windows, end by end.

        Raises EvalError if the engine answered with an error.
        """
        if outputs[-1].finish_reason is FinishReason.ERROR:
            raise EvalError(f"a request failed in the engine: {outputs[-1].error}")
        if not isinstance(self.of, LengthText):
            return [_score_of(self.of, outputs)]
        text, first = self.of, self.of.first_target
        entries = [each for out in outputs for each in out.prompt_logprobs if each is not None]
        assert len(entries) == len(self.prompt_ids) - first
        return [
            WindowScore(
                text.source,
                -math.fsum(each.logprob for each in entries[begin - first : end - first]),
                end - begin,
                num_bytes,
            )
            for at in range(len(text.ends))
            for begin, end, num_bytes in text.windows(at)
        ]


def _score_of(of: LengthWindow | Query, outputs: Sequence[Output]) -> Score:
    """Return the score of an answer."""
    if isinstance(of, LengthWindow):
        entries = [each for out in outputs for each in out.prompt_logprobs if each is not None]
        nats = -math.fsum(each.logprob for each in entries)
        return WindowScore(of.source, nats, len(entries), of.target_bytes)
    text = "".join(each.text for each in outputs)
    form, is_right = of.needle.form.name, of.is_answered_by(text)
    return QueryScore(form, of.depth, of.position, is_right, text)


@dataclass(frozen=True, slots=True)
class LengthCell:
    """Requests of one kind, length and profile."""

    kind: str
    context_len: int
    tier_choice: TierChoice
    tasks: tuple[Task, ...]

    def at_length(self, context_len: int, scores: Sequence[Score]) -> list[Score]:
        """Return those of the cell's scores that belong to a length."""
        texts = [task.of for task in self.tasks if isinstance(task.of, LengthText)]
        if not texts:
            return list(scores)
        ends, counts = texts[0].ends, texts[0].num_windows
        at = ends.index(context_len)
        begin = sum(counts[:at])
        return [
            score
            for first in range(0, len(scores), sum(counts))
            for score in scores[first + begin : first + begin + counts[at]]
        ]

    @property
    def size(self) -> int:
        """Return the number of tokens in all prompts."""
        return sum(len(task.prompt_ids) for task in self.tasks)

    @property
    def label(self) -> str:
        """Return a label, for example `retrieval, 1024 tokens, yarn x4`."""
        profile = self.tier_choice.tier.profile
        logn = "+logn" if profile.logn_len is not None else ""
        table = f"{profile.name}{logn} x{self.tier_choice.tier.factor:g}"
        if self.tier_choice.lower_tiers:
            table += " by position"
        return f"{self.kind}, {self.context_len} tokens, {table}"

    def in_words(self) -> dict[str, object]:
        """Return what a reader of the record wants to know."""
        profile = repr(tables_of(self.tier_choice))
        return {"kind": self.kind, "context_len": self.context_len, "profile": profile}

    def key(self, model_digest: str) -> str:
        """Return a key that is equal only for equal requests, model and table."""
        tables = tables_of(self.tier_choice)
        parts = (model_digest, self.kind, self.context_len, tables, self.tasks)
        return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:32]


At = tuple[str, int, object]  # kind, length, tables


def tables_of(tier_choice: TierChoice) -> object:
    """Return what decides on a prompt's tables: its profile, or the ends of those below it, too."""
    profile = tier_choice.tier.profile
    lower = tuple((each.ceiling, each.profile) for each in tier_choice.lower_tiers)
    return (*lower, profile) if lower else profile


@dataclass(frozen=True, slots=True)
class Grid:
    """All cells, and the cells by kind that the numbers of a variant at a length come from."""

    cells: Mapping[At, LengthCell]
    of_variant: Mapping[tuple[Variant, int], Mapping[str, At]]


def make_grid(
    *,
    plan: LengthPlan,
    deployments: Mapping[Variant, Deployment],
    texts: Texts,
    windows: Sequence[LengthWindow],
    sources: Sequence[LengthSource],
    haystacks: Sequence[Haystack],
    tokenizer: Tokenizer,
    chat: ChatFrame | None = None,
) -> Grid:
    """Build the grid, shortest lengths first for early results. Raises EvalError.

    `windows` have the same targets at every length, and `sources` are texts that are read once.
    """
    cells: dict[At, LengthCell] = {}
    of_variant: dict[tuple[Variant, int], dict[str, At]] = defaultdict(dict)
    if sources:
        place = partial(_place, plan, deployments)
        _add_texts(cells, of_variant, plan, place, _readings(plan, texts, sources, tokenizer))
    for context_len in plan.context_lens:
        queries = _queries(haystacks, context_len, tokenizer, chat)
        tasks = {
            PERPLEXITY: tuple(_window_task(each, context_len, texts, plan) for each in windows),
            RETRIEVAL: tuple(map(_query_task, queries))[: plan.num_queries],
        }
        for (kind, of_kind), variant in itertools.product(tasks.items(), plan.variants):
            if not of_kind:
                continue
            tier_choice = _place(plan, deployments, variant, of_kind[0])
            at = (kind, context_len, tables_of(tier_choice))
            cells.setdefault(at, LengthCell(kind, context_len, tier_choice, of_kind))
            of_variant[variant, context_len][kind] = at
    return Grid(cells, of_variant)


def measure(engine: Engine, cell: LengthCell, progress: Progress) -> list[Score]:
    """Send a cell's requests to the engine. The progress advances by prompt tokens."""
    scores: list[Score] = []
    for first in range(0, len(cell.tasks), TOGETHER):
        tasks = cell.tasks[first : first + TOGETHER]
        requests = [
            Request(f"{cell.kind}-{first + at}", task.prompt_ids, task.sampling, cell.tier_choice)
            for at, task in enumerate(tasks)
        ]
        answers = engine.generate(requests)
        for task, outputs in zip(tasks, answers, strict=True):
            scores += task.scores(outputs)
        progress.advance(sum(len(task.prompt_ids) for task in tasks), cell.label)
    return scores


def _window_task(window: LengthWindow, context_len: int, texts: Texts, plan: LengthPlan) -> Task:
    prompt_ids = window.prompt(context_len, texts.special_ids)
    first = context_len - plan.target_tokens
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=first)
    return Task(prompt_ids, sampling, window)


def _queries(
    haystacks: Sequence[Haystack], context_len: int, tokenizer: Tokenizer, chat: ChatFrame | None
) -> list[Query]:
    """Return the questions of all haystacks. Raises EvalError."""
    try:
        return [query for each in haystacks for query in each.queries(context_len, tokenizer, chat)]
    except HaystackError as error:
        raise EvalError(f"--context-lens: {error}") from error


def _query_task(query: Query) -> Task:
    # The rest of the line after the value is not needed.
    stop = () if query.in_chat else ("\n",)
    sampling = SamplingParams(max_tokens=query.max_tokens, temperature=0.0, stop=stop)
    return Task(query.prompt_ids, sampling, query)


def _add_texts(
    cells: dict[At, LengthCell],
    of_variant: dict[tuple[Variant, int], dict[str, At]],
    plan: LengthPlan,
    place: Callable[[Variant, Task], TierChoice],
    tasks: Callable[[tuple[int, ...]], tuple[Task, ...]],
) -> None:
    """Add a cell for each table that texts are read under, from the longest length on.

    A length is measured by a longer one's request if all its positions have the same tables there.
    `tasks` makes those of lengths that are measured together.
    """
    served: dict[TierChoice, list[tuple[Variant, int]]] = {}
    for context_len in sorted(plan.context_lens, reverse=True):
        for variant in plan.variants:
            tier_choice = place(variant, tasks((context_len,))[0])
            own = _path(tier_choice, context_len)
            longer = (each for each in served if _path(each, context_len) == own)
            served.setdefault(next(longer, tier_choice), []).append((variant, context_len))
    for tier_choice, measured in served.items():
        ends = tuple(sorted({context_len for _, context_len in measured}))
        at = (PERPLEXITY, ends[-1], tables_of(tier_choice))
        cells[at] = LengthCell(PERPLEXITY, ends[-1], tier_choice, tasks(ends))
        for variant, context_len in measured:
            of_variant[variant, context_len][PERPLEXITY] = at


def _readings(
    plan: LengthPlan, texts: Texts, sources: Sequence[LengthSource], tokenizer: Tokenizer
) -> Callable[[tuple[int, ...]], tuple[Task, ...]]:
    """Return a maker of the requests, one a text, that measure several lengths."""
    num_bytes = [
        (*(0 for _ in texts.special_ids), *(len(tokenizer.token_bytes(each)) for each in ids))
        for ids in (source.token_ids for source in sources)
    ]

    def tasks(ends: tuple[int, ...]) -> tuple[Task, ...]:
        size, counts = ends[-1], tuple(plan.windows_at(each) for each in ends)
        made = []
        for source, of_tokens in zip(sources, num_bytes, strict=True):
            of = LengthText(source.name, ends, counts, plan.target_tokens, of_tokens[:size])
            prompt_ids = (*texts.special_ids, *source.token_ids)[:size]
            sampling = SamplingParams(
                max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=of.first_target
            )
            made.append(Task(prompt_ids, sampling, of))
        return tuple(made)

    return tasks


def _path(tier_choice: TierChoice, num_positions: int) -> list[tuple[int, Profile]]:
    """Return the profiles of a prompt's first positions, each with its end."""
    path: list[tuple[int, Profile]] = []
    for tier in tier_choice.prompt_tiers:
        if path and path[-1][1] == tier.profile:
            path.pop()
        path.append((min(tier.ceiling, num_positions), tier.profile))
        if tier.ceiling >= num_positions:
            break
    return path


def _place(
    plan: LengthPlan, deployments: Mapping[Variant, Deployment], variant: Variant, task: Task
) -> TierChoice:
    untouched = variant.policy is None and not plan.carries_scaling
    asked = RopeRequest(rope_type="default") if untouched else RopeRequest()
    tier_choice = deployments[variant].choose(asked, len(task.prompt_ids), task.sampling.max_tokens)
    # The cell keeps only the deployment's table.
    return replace(tier_choice, deployment="eval", requested_factor=None)
