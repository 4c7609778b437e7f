"""The one error of this package.

ValueError
`-- RopeConfigError    a rope setting cannot be used; names field, limit and value
"""


class RopeConfigError(ValueError):
    """An unusable field or value in a rope block, tier list or request."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
