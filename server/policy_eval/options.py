"""The options of `ropewalk eval --policies`, and the values that they accept."""

from dataclasses import dataclass
from pathlib import Path

METHODS = ("yarn", "dynamic", "ntk", "linear", "llama3")
MOST_CROSSINGS = 6  # 64 times L


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingOptions:
    """The options of a comparison; lengths are in tokens."""

    output: Path  # a folder
    methods: tuple[str, ...]  # `yarn@8`: a tier every 8 tokens instead of doubling
    num_crossings: tuple[int, ...]  # ascending
    num_windows: int
    windows_together: int  # in one batch; times are those of a request in this batch
    scored_tokens: int  # after the last tier change
    lead_tokens: int  # decoded before the first
    native_len: int | None  # L; None: the checkpoint's
    seed: int  # of texts and needles
    resumes: bool
