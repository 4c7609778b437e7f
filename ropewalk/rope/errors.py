"""The one error of this package.

ValueError
`-- RopeConfigError    a rope setting cannot be used; names field, limit and value
"""

from collections.abc import Mapping
from typing import Literal, get_args


class RopeConfigError(ValueError):
    """An unusable field or value in a rope block, tier list or request."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


ROPE_TYPES = ("default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope")
SWITCHING = ("longrope", "dynamic")  # their checkpoints change the table by length themselves
POSITION_METHODS = ("native", "dual_chunk", "rerope", "self_extend", "string", "sinks")

# The tokens that are there choose a request's tier, or under `fixed` the operator does.
Policy = Literal["by_position", "grow", "grow-exact", "fixed"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
# Release 0.1 chose the tier of `pinned` by max_tokens. Without that, it is `grow`.
OTHER_POLICY_NAMES: Mapping[str, Policy] = {"pinned": "grow"}
