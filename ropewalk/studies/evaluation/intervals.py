"""Estimates with 95 % intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959964  # of the normal distribution, 95 % two-sided


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float | None  # None: one observation has no spread
    high: float | None


def proportion(num_right: int, num_all: int) -> Estimate:
    """Return a share and its Wilson score interval (Wilson 1927), which stays within 0 and 1."""
    share = num_right / num_all
    spread = Z * math.sqrt(share * (1 - share) / num_all + Z**2 / (4 * num_all**2))
    middle = share + Z**2 / (2 * num_all)
    scale = 1 + Z**2 / num_all
    # At shares of 0 and 1 the formula gives exactly 0 and 1, except for rounding.
    low = min(share, max(0.0, (middle - spread) / scale))
    high = max(share, min(1.0, (middle + spread) / scale))
    return Estimate(share, low, high)


def mean(values: Sequence[float]) -> Estimate:
    """Return a mean, and 1.96 of its standard errors to either side."""
    middle = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(middle, None, None)
    variance = math.fsum((each - middle) ** 2 for each in values) / (len(values) - 1)
    reach = Z * math.sqrt(variance / len(values))
    return Estimate(middle, middle - reach, middle + reach)


def exponential(nats: Estimate) -> Estimate:
    """Return exp of all three numbers: mean nats per token become perplexity."""
    low, high = (None if each is None else math.exp(each) for each in (nats.low, nats.high))
    return Estimate(math.exp(nats.value), low, high)
