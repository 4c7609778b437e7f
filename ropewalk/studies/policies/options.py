"""The options of `ropewalk eval policies`."""

from dataclasses import dataclass

from ropewalk.studies.harness.options import COUNT, EvalOptions, Integers, SteppedNames, option

METHODS = ("yarn", "dynamic", "ntk", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingOptions(EvalOptions):
    """The options of a comparison; lengths are in tokens."""

    methods: tuple[str, ...] = option(
        f"Methods: {', '.join(METHODS)}. yarn@8 has a tier every 8 tokens; without @, tiers "
        "double. Default: yarn.",
        SteppedNames(METHODS),
        ("yarn",),
    )
    num_windows: int = option("Sequences of text, the same for every policy.", COUNT, 32)
    num_crossings: tuple[int, ...] = option(
        "Number of tiers that a sequence crosses. Default: 1,2,3.", Integers(most=6), (1, 2, 3)
    )  # 6 crossings: 64 times L
    windows_together: int = option(
        "Sequences in a batch. Times are those of a request in a batch of this size.", COUNT, 16
    )
    scored_tokens: int = option(
        "Tokens after the last crossing whose perplexity is measured.", COUNT, 64
    )
    lead_tokens: int = option("Tokens decoded before the first crossing.", COUNT, 16)
    native_len: int | None = option(
        "Length of the first tier, at most the checkpoint's trained length. Default: the trained "
        "length.",
        COUNT,
    )
