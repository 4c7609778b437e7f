"""The state of a request while it is served. The scheduler and the engine share it."""

from dataclasses import dataclass, field

from model_runtime.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known so far, and how many of them are in the cache."""

    request: Request
    token_ids: list[int] = field(default_factory=list)  # prompt and answer
    pages: list[int] = field(default_factory=list)  # page table, in order of position
    num_computed: int = 0  # tokens whose keys and values are in the cache

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that a forward has still to see."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes the one token generated last."""
        return self.num_generated > 0 and self.num_uncomputed == 1
