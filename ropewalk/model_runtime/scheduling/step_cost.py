"""The seconds of a decode step by its rows, learnt from the steps themselves."""

_FORGET = 0.97  # weight of older steps, for each step
_FIRST_SLOPE = 0.06  # of a row, in steps of the usual size, before other sizes were measured
_PRIOR = 4.0  # squared rows that weigh as much as the first slope
_OUTLIER = 3.0  # times the mean: the step waited for something else


class StepCost:
    """A line through rows and seconds of recent decode steps, with older ones forgotten.

    If all recent steps had the same size, then the slope goes back to the first one.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._square = self._product = 0.0

    @property
    def is_known(self) -> bool:
        """Return whether a step was recorded."""
        return self._weight > 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step that only decoded."""
        if self._weight:
            seconds = min(seconds, _OUTLIER * self._seconds / self._weight)
        self._weight = _FORGET * self._weight + 1
        self._rows = _FORGET * self._rows + num_rows
        self._seconds = _FORGET * self._seconds + seconds
        self._square = _FORGET * self._square + num_rows**2
        self._product = _FORGET * self._product + num_rows * seconds

    def line(self, num_rows: int) -> tuple[float, float]:
        """Return the seconds of a step with so many rows, and those of one more row.

        Before the first step, the unit is a step instead of a second.
        """
        if not self._weight:
            return 1.0, _FIRST_SLOPE
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        variance = max(0.0, self._square - self._rows * mean_rows)
        covariance = self._product - self._seconds * mean_rows
        slope = (covariance + _PRIOR * _FIRST_SLOPE * mean) / (variance + _PRIOR)
        slope = max(slope, 0.0)
        return max(mean + slope * (num_rows - mean_rows), slope), slope
