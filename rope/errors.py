"""The one error of this package.

ValueError
`-- RopeConfigError    a rope setting cannot be used; names field, limit and value
"""

from typing import Literal, get_args


class RopeConfigError(ValueError):
    """An unusable field or value in a rope block, tier list or request."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


ROPE_TYPES = ("default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope")
POSITION_METHODS = ("native", "dual_chunk", "rerope", "self_extend", "string", "sinks")

Policy = Literal["fixed", "pinned", "grow", "grow-exact", "by_position"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
# Those under which a request's tier follows its length.
GROWING: tuple[Policy, ...] = ("grow", "grow-exact", "by_position")
