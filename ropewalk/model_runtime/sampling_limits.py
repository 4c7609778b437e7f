"""The limits of sampling parameters, in requests, in settings and in the files of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """The values that one parameter may have."""

    least: float
    most: float
    is_above: bool = False  # values are above `least`, and not equal to it
    is_integer: bool = False

    @property
    def bounds(self) -> dict[str, Any]:
        """Return the limit in pydantic's words."""
        return {"gt" if self.is_above else "ge": self.least, "le": self.most}

    def admits(self, value: object) -> bool:
        """Return whether a value of JSON is a number within the limit; NaN is within none."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if self.is_integer and not isinstance(value, int):
            return False
        return (self.least < value if self.is_above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        kind = "an integer" if self.is_integer else "a number"
        if self.is_above:
            return f"{kind} above {self.least:g} and at most {self.most:g}"
        if self.most == INT64:
            return f"{kind} of at least {self.least:g}"
        return f"{kind} from {self.least:g} to {self.most:g}"


# By the names of SamplingParams. A model's files and the operator may set them, as in vLLM.
SAMPLING_LIMITS: Mapping[str, Limit] = {
    "temperature": Limit(0, 2),
    "top_p": Limit(0, 1, is_above=True),
    "top_k": Limit(-1, INT64, is_integer=True),
    "min_p": Limit(0, 1),
    "repetition_penalty": Limit(0.01, 10),
}
