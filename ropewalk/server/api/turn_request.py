"""The limits and sampling of a turn, whatever body it came in."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from ropewalk.model_runtime.errors import RequestError
from ropewalk.server.api.generation_schema import GenerationRequest
from ropewalk.server.api.parts.request_fields import RequestFields


class TurnRequest(GenerationRequest):
    """A generating request that a route builds from its own body, which has checked the fields."""

    prompt_field: ClassVar[str] = "messages"
    names: ClassVar[Mapping[str, str]]  # our names of fields in errors -> those of the route's body

    max_tokens: int | None = None

    @classmethod
    def of(cls, body: RequestFields, **others: Any) -> "TurnRequest":
        """Build it from the fields that mean the same in all bodies, and from `others`."""
        alike = {name: getattr(body, name) for name in RequestFields.model_fields}
        return cls.model_construct(None, **alike, **others)

    def own_name(self, param: str | None) -> str | None:
        return self.names.get(param or "", param)

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Return None: these routes report no logprobs."""
        return None


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of the block name the fields as the body does. `names`: of ours, the body's."""
    try:
        yield
    except RequestError as error:
        told = str(error)
        for ours, theirs in names.items():
            told = told.replace(f"`{ours}`", f"`{theirs}`")
        error.args = (told,)
        error.param = names.get(error.param or "", error.param)
        raise
