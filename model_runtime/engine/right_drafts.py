"""The states of layers after a step with drafts.

The step advances a sequence's states by its known token only. The inputs of the draft's tokens are
kept (`ModelRunner.advance_states`). Tokens that turn out right advance the states afterwards, in
the same order as steps of their own would. So the bits are those without drafts.
"""

from collections.abc import Iterable, Sequence

from ropewalk.model_runtime.engine.runner import Runner, memory_errors_told
from ropewalk.model_runtime.runner.step_timer import StepTimer
from ropewalk.model_runtime.scheduling.sequence import Sequence as TokenSequence
from ropewalk.model_runtime.scheduling.sequence_states import SequenceStates
from ropewalk.model_runtime.state_shape import StatePart


class RightDrafts:
    """Advances the states of one engine's sequences by the right tokens of drafts."""

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
