"""The messages between the API and an engine: requests one way, outputs the other.

An output is a tuple of its number and Output's fields, without the trailing ones that have their
defaults, and without a tier that the last output had, too.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

from ropewalk.model_runtime.request import Output, Request
from ropewalk.model_runtime.text.grammar import Source
from ropewalk.rope import Tier

ACCEPTED = "accepted"
# Why a replica cannot serve a request, or cannot go on with it.
STOPPED = "stopped"
FULL = "full"
# Why the API gives a run up.
MISSING = "missing"  # an output was lost on its way

_DEFAULTS = tuple(Output())
_TIER = Output._fields.index("tier")


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request as another process receives it."""

    request: Request  # without its grammar, which cannot be sent
    grammar: Source | None  # what the grammar is compiled from
    waited_s: float  # seconds since the client sent it

    @classmethod
    def of(cls, request: Request, waited_s: float) -> "SentRequest":
        source = None if request.grammar is None else request.grammar.source
        return cls(replace(request, grammar=None), source, waited_s)


class MissingOutputError(Exception):
    """An output of a request never came."""


class OutputEncoder:
    """Turns the outputs of one request into tuples."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._tier: Tier | None = None

    def encode(self, output: Output) -> tuple[Any, ...]:
        """Return the tuple of an output."""
        if output.tier is self._tier:
            output = output._replace(tier=None)
        else:
            self._tier = output.tier
        end = len(output)
        while end and output[end - 1] == _DEFAULTS[end - 1]:
            end -= 1
        return (next(self._numbers), *output[:end])


class OutputDecoder:
    """Turns the tuples of one request into outputs again."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._tier: Tier | None = None

    def decode(self, numbered: tuple[Any, ...]) -> Output:
        """Return the output of a tuple, with the tier of the last one if it has none.

        Raises MissingOutputError unless it is the next one: a client must not see a gap.
        """
        number, *fields = numbered
        if number != next(self._numbers):
            raise MissingOutputError
        if len(fields) > _TIER and fields[_TIER] is not None:
            self._tier = fields[_TIER]
            return Output(*fields)
        return Output(*fields)._replace(tier=self._tier)
