"""What a server serves, as its /v1/models tells it."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Fields that differ between servers that answer alike.
_OWN = frozenset({"created", "kv_cache", "same_bits_in_any_batch"})
_FINGERPRINTS = ("fingerprint", "arithmetic")
_MOST_REASONS = 3  # in an answer
_SHOWN = 8  # digits of a fingerprint in the log


@dataclass(frozen=True, slots=True)
class Facts:
    """What servers must have in common. Streams go on between equal ones only."""

    listing: str
    fingerprints: tuple[str, ...] = ()  # of all names; none without a key of the router
    arithmetic: tuple[str, ...] = ()

    @property
    def served(self) -> tuple[str, tuple[str, ...]]:
        """Return what servers that take requests have in common."""
        return self.listing, self.fingerprints


Served = tuple[str, tuple[str, ...]]


def facts_of(models: Any, *, has_key: bool) -> Facts:
    """Return what a list of models tells.

    `has_key`: whether it was asked for with the router's key. Without it a server tells
    fingerprints only if another router has asked for them.
    """
    entries = models.get("data") if isinstance(models, dict) else None
    if not isinstance(entries, list):
        return Facts("unreadable")
    found = [each for each in entries if isinstance(each, dict)]
    left_out = {*_OWN, *_FINGERPRINTS}
    listing = [
        {name: value for name, value in each.items() if name not in left_out} for each in found
    ]
    prints, arithmetic = (
        tuple(str(each.get(name, "none")) for each in found) if has_key else ()
        for name in _FINGERPRINTS
    )
    return Facts(json.dumps(listing, sort_keys=True), prints, arithmetic)


def none_ready(problems: Iterable[str]) -> str:
    """Return in a sentence that no server is ready, and why, without an address.

    The log has addresses and whole reasons. A client without a key may not know them.
    """
    num_of = Counter(each.partition(": ")[0] for each in problems)
    if not num_of:
        return "No server is ready."
    told = [
        why if num == 1 else f"{num} of them: {why}"
        for why, num in num_of.most_common(_MOST_REASONS)
    ]
    return f"No server is ready ({'; '.join(told)})."


def why_none_goes_on(
    begun: Facts | None, others: Iterable[Facts | None], problems: Iterable[str]
) -> str:
    """Return in a sentence why no server goes on with a stream that another one began."""
    arithmetic = [each.arithmetic for each in others if each is not None]
    if begun is None or not arithmetic or begun.arithmetic in arithmetic:
        return none_ready(problems)
    return (
        "The server was lost, and the others compute on another processor or with other "
        "libraries, so the rest of the answer could be another one."
    )


def difference(found: Served, agreed: Served) -> tuple[str, str]:
    """Return in one word and in a sentence in what a server differs from most servers."""
    if found[0] != agreed[0]:
        return "listing", "its /v1/models lists other models or settings than most servers"
    pairs = zip(found[1], agreed[1], strict=False)
    its, theirs = next(
        ((one[:_SHOWN], other[:_SHOWN]) for one, other in pairs if one != other), ("none", "none")
    )
    return "fingerprint", (
        f"its fingerprint is {its} and that of most servers {theirs}: its weights, number types, "
        "settings or version are others"
    )
