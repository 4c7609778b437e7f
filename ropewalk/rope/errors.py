"""The one error of this package."""


class RopeConfigError(ValueError):
    """An unusable field or value in a rope block, tier list or request; names field and limit."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
