"""Drafts in the engine's steps: their tokens are computed as further rows of a decode.

Each row goes through an ordinary decode, so each token is the one that the model chooses in that
step. It only may be chosen in the same step as the one before it. If a row's logits have the same
bits whatever the other rows are, then the answer is that without drafts. A wrong draft leaves
nothing behind: its keys are overwritten by the next step, and nothing of it is published.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.observer import Observer
from ropewalk.model_runtime.engine.request_state import RequestState, RequestStates
from ropewalk.model_runtime.engine.runner import Runner, memory_errors_told
from ropewalk.model_runtime.runner.step_timer import Part, StepTimer
from ropewalk.model_runtime.scheduling.drafts.draft_lengths import Offer, take
from ropewalk.model_runtime.scheduling.drafts.drafter import NO_DRAFT, Draft, Drafter
from ropewalk.model_runtime.scheduling.sequence import Sequence as TokenSequence
from ropewalk.model_runtime.scheduling.sequence_pages import SequencePages
from ropewalk.model_runtime.scheduling.sequence_states import SequenceStates
from ropewalk.model_runtime.scheduling.step_cost import StepCost
from ropewalk.model_runtime.scheduling.step_plan import Chunk, StepPlan
from ropewalk.model_runtime.state_shape import StatePart


@dataclass(slots=True)
class _Drafted:
    """A decode with a draft that pays, before its step."""

    chunk: Chunk
    state: RequestState
    drafter: Drafter
    offer: Offer
    num_known: int  # tokens


class Speculator:
    """Adds drafts to plans that only decode, and learns from their steps."""

    def __init__(
        self,
        most_rows: int,
        max_draft_tokens: int,
        pages: SequencePages,
        observer: Observer,
        *,
        stays_in_page: bool = False,
    ) -> None:
        """Take the most rows of a step, and the most tokens of a sequence's draft.

        `stays_in_page`: a draft ends with the page that it begins in. A sequence has one tail page,
        and a wrong draft must not have overwritten it.
        """
        self._stays_in_page = stays_in_page
        self._most_rows = most_rows
        self._max_draft_tokens = max_draft_tokens
        self._pages = pages
        self._observer = observer
        self._cost = StepCost()
        self._drafted: list[_Drafted] = []  # in the step that runs
        self._expected: list[_Drafted] = []  # whose first token the step that runs computes

    @classmethod
    def of(
        cls, runner: Runner, config: EngineConfig, pages: SequencePages, observer: Observer
    ) -> "Speculator | None":
        """Return the speculator of an engine; None if it does not speculate."""
        if not config.max_draft_tokens:
            return None
        most_rows = min(runner.most_draft_rows, config.max_num_batched_tokens)
        if most_rows <= 1:
            return None
        most = config.max_draft_tokens
        return cls(most_rows, most, pages, observer, stays_in_page=config.quantises_pages)

    @property
    def has_drafts(self) -> bool:
        return bool(self._drafted)

    def add_drafts(self, plan: StepPlan, requests: RequestStates) -> None:
        """Extend the decodes of a plan by tokens of drafts that pay, and allocate their pages."""
        num_sequences = len(plan.chunks)
        found = self._found(plan.chunks.values(), requests)
        states = self._pages.states
        if found and states is not None and not states.reserve_draft_slot():
            return
        for each in found:
            chunk, offer = each.chunk, each.offer
            offer.num_taken = self._num_with_pages(chunk, offer.num_taken, num_sequences)
            if offer.num_taken:
                token_ids = tuple(offer.draft.token_ids[: offer.num_taken])
                plan.chunks[chunk.sequence] = chunk._replace(
                    num_tokens=1 + offer.num_taken, draft=token_ids
                )
                self._drafted.append(each)

    def expects_drafts(self, plan: StepPlan, requests: RequestStates) -> bool:
        """Return whether the step after a launched one will probably have drafts that pay.

        The first token of each is the one that the launched step computes, and so verifies. A step
        with a prompt has no drafts.
        """
        if not all(chunk.is_last for chunk in plan.chunks.values()):
            return False
        found = self._found(plan.chunks.values(), requests)
        self._expected = [each for each in found if each.offer.num_taken > 1]
        return bool(self._expected)

    def learn(self, plan: StepPlan, seconds: Mapping[Part, float] | None) -> None:
        """Record the tokens and the time of a step; None: it failed."""
        drafted, self._drafted = self._drafted, []
        expected, self._expected = self._expected, []
        if seconds is None:
            return
        for each in expected:
            known, draft = each.state.sequence.token_ids, each.offer.draft
            if len(known) > each.num_known:
                is_right = known[each.num_known] == draft.token_ids[0]
                each.drafter.verified(draft, 1, int(is_right), len(known))
        for each in drafted:
            num_known, num_drafted = len(each.state.sequence.token_ids), each.offer.num_taken
            num_accepted = each.drafter.num_right
            each.drafter.verified(each.offer.draft, num_drafted, num_accepted, num_known)
            self._observer.speculated(num_drafted, num_accepted)
        if plan.chunks and plan.is_decode_only:
            num_rows = len(plan.chunks) + sum(each.offer.num_taken for each in drafted)
            self._cost.note(num_rows, sum(seconds.values()))

    def _found(self, chunks: Collection[Chunk], requests: RequestStates) -> list[_Drafted]:
        """Return the decodes whose drafts have tokens that pay. None of their pages are there."""
        if not 0 < len(chunks) < self._most_rows:
            return []
        found: list[_Drafted] = []
        for chunk in chunks:
            most = self._most_tokens(chunk)
            if most < 1 or not chunk.sequence.is_running:
                continue
            state = requests.of(chunk.sequence)
            drafter = state.drafter
            if drafter is None:
                drafter = state.drafter = Drafter(chunk.sequence.request.prediction_ids)
            draft = _proposed(state, drafter, most)
            if draft.token_ids:
                num_known = len(chunk.sequence.token_ids)
                found.append(_Drafted(chunk, state, drafter, Offer(draft), num_known))
        if found:
            take([each.offer for each in found], len(chunks), self._most_rows, self._cost)
        return [each for each in found if each.offer.num_taken]

    def _most_tokens(self, chunk: Chunk) -> int:
        """Return the most tokens of a draft: within max_tokens, and under the chunk's table."""
        sequence = chunk.sequence
        num_left = sequence.request.sampling.max_tokens - sequence.num_generated - 1
        in_tier = chunk.tier.ceiling - len(sequence.token_ids)
        most = min(self._max_draft_tokens, num_left, in_tier)
        if self._stays_in_page:
            page_size = self._pages.page_size
            most = min(most, page_size - 1 - sequence.num_computed % page_size)
        return most

    def _num_with_pages(self, chunk: Chunk, num_drafted: int, num_sequences: int) -> int:
        """Return how many tokens of a draft have pages.

        No other sequence is preempted for them, and each keeps a page for its next token. A page
        beyond the chosen tokens stays for the next step.
        """
        sequence, pages = chunk.sequence, self._pages
        begin = sequence.num_computed + 1
        num_free = max(0, pages.pool.num_available // pages.num_groups - num_sequences)
        most_pages = pages.num_per_group(sequence.pages) + num_free
        num_drafted = min(num_drafted, most_pages * pages.page_size - begin)
        if pages.num_needed(sequence, begin + num_drafted):
            pages.allocate(sequence, begin + num_drafted)
        return num_drafted


def _proposed(state: RequestState, drafter: Drafter, most: int) -> Draft:
    """Return the draft of a request, cut to the tokens that its grammar allows.

    It ends before a token that would end the answer: no row behind that one is of use.
    """
    sequence = state.sequence
    forced_ids = () if state.constraint is None else state.constraint.forced()
    draft = drafter.propose(sequence.token_ids, sequence.num_prompt_tokens, most, forced_ids)
    if not draft.token_ids:
        return NO_DRAFT
    end_ids = state.answer.end_ids
    num_kept = next((at for at, each in enumerate(draft.token_ids) if each in end_ids), most)
    if state.constraint is not None:
        num_kept = state.constraint.num_allowed(draft.token_ids[:num_kept])
    return draft._replace(token_ids=draft.token_ids[:num_kept]) if num_kept else NO_DRAFT


class RightDrafts:
    """Advances the states of one engine's sequences by the right tokens of drafts.

    The step advances a sequence's states by its known token only. The inputs of the draft's tokens
    are kept (`ModelRunner.advance_states`). Tokens that turn out right advance the states
    afterwards, in the same order as steps of their own would. So the bits are those without drafts.
    """

    def __init__(self, states: SequenceStates, runner: Runner, clock: StepTimer) -> None:
        self._states = states
        self._runner = runner
        self._clock = clock

    def begin(self, sequence: TokenSequence, row: int) -> None:
        """Note the row of a sequence's known token in the step that has run."""
        self._states.verify_draft(sequence, row + 1)

    def before_row(self, sequences: Sequence[TokenSequence]) -> None:
        """Advance by the next token where it ends a page, because a snapshot may be due there.

        The token may end the answer, and its slots are free then.
        """
        size = self._states.page_size
        ends = [(each, each.num_computed + 1) for each in sequences]
        self._advance((each, end) for each, end in ends if end % size == 0)

    def after_rows(self, sequences: Iterable[TokenSequence]) -> None:
        """Advance running sequences by all of their right tokens."""
        behind = [
            each
            for each in sequences
            if each.state is not None and each.state.num_tokens < each.num_computed
        ]
        self._advance((each, each.num_computed) for each in behind)
        for sequence in behind:
            self._states.computed(sequence)

    def _advance(self, ends: Iterable[tuple[TokenSequence, int]]) -> None:
        """Advance sequences to some numbers of tokens, in one pass over the layers."""
        parts: list[tuple[int, Sequence[StatePart]]] = [
            self._states.right_parts(sequence, end) for sequence, end in ends
        ]
        if parts:
            with self._clock.part("forward"), memory_errors_told():
                self._runner.advance_states(parts)
