"""The operator's limits on a request, beside those of the engine and the schema."""

from dataclasses import dataclass

from model_runtime.errors import RequestError
from server.api.generation_schema import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Limits that are checked before anything is tokenised; times are in seconds."""

    max_prompts: int
    max_n: int
    max_stop_strings: int  # in the request itself; a chat template may add some
    max_prompt_chars: int | None  # None: the max of the longest context
    max_unread_tokens: int  # outputs that a stream may leave unread
    sse_keep_alive_s: float | None  # without an event in a stream before a comment
    stall_s: float  # the max duration of a step

    def check(self, body: GenerationRequest) -> None:
        """Check a request. Raises RequestError, which names field, limit and value."""
        for param, most, what, given in (
            (body.prompt_field, self.max_prompts, "prompts", body.num_prompts),
            (body.answers_field, self.max_n, "answers", body.num_answers),
            ("stop", self.max_stop_strings, "strings", body.num_stop_strings),
        ):
            if given > most:
                raise RequestError(
                    f"`{param}` must be at most {most} {what}. Given: {given}", param=param
                )
