"""The one error of this package.

ValueError
`-- RopeConfigError    a rope setting cannot be used; names field, limit and value
"""


class RopeConfigError(ValueError):
    """A rope block, tier list or request names something that cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
