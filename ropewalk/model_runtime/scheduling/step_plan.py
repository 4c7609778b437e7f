"""The plan of one step: which tokens of which sequences are computed."""

from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from typing import NamedTuple

from ropewalk.model_runtime.scheduling.sequence import Sequence
from ropewalk.rope import Tier

_ONE_ROW = range(1)


class Chunk(NamedTuple):
    """Tokens of one sequence that the next step computes. A NamedTuple is faster to create."""

    sequence: Sequence
    first: int  # position of its first token
    num_tokens: int
    tier: Tier  # its table rotates these tokens and the cached keys before them
    # The first token is the newest one, and it follows the prompt. A launched step may have yet to
    # compute it. Then comes the draft.
    is_decode: bool = False
    draft: tuple[int, ...] = ()  # tokens that may follow, which this step verifies

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.first + self.num_tokens

    @property
    def is_last(self) -> bool:
        """Return whether the chunk ends at the newest token, so that another one is sampled."""
        return self.is_decode or self.end == len(self.sequence.token_ids)

    @property
    def is_scored(self) -> bool:
        """Return whether logprobs of its prompt tokens are requested and not yet delivered."""
        sequence = self.sequence
        if self.is_decode or sequence.request.sampling.prompt_logprobs is None:
            return False
        return max(self.first, sequence.num_scored) < sequence.num_prompt_tokens

    @property
    def token_ids(self) -> TokenIds[int]:
        """Return the known tokens that the step computes, with those of the draft."""
        first, draft = self.first, self.draft
        known = self.sequence.token_ids[first : first + self.num_tokens - len(draft)]
        return [*known, *draft] if draft else known

    @property
    def logit_rows(self) -> range:
        """Return the rows of the chunk whose logits are needed, counted from its first token."""
        if self.is_decode:
            return range(self.num_tokens) if self.draft else _ONE_ROW
        if self.is_scored:
            return range(max(self.sequence.num_scored - self.first, 0), self.num_tokens)
        return range(self.num_tokens - 1, self.num_tokens) if self.is_last else range(0)

    @property
    def num_scored_rows(self) -> int:
        return len(self.logit_rows) if self.is_scored else 0


@dataclass(slots=True)
class StepPlan:
    """One step, with the preemptions and tier changes that it required."""

    chunks: dict[Sequence, Chunk] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)
    rescaled: list[Sequence] = field(default_factory=list)

    @property
    def is_decode_only(self) -> bool:
        """Return whether every chunk is a decode. The decodes are the first chunks."""
        return not self.chunks or next(reversed(self.chunks.values())).is_decode

    @property
    def num_prefill_tokens(self) -> int:
        """Return the number of prefill tokens, including answers that are computed again."""
        return sum([each.num_tokens for each in self.chunks.values() if not each.is_decode])

    @property
    def num_decode_rows(self) -> int:
        """Return the tokens of the decodes, those of drafts included."""
        return sum([each.num_tokens for each in self.chunks.values() if each.is_decode])
