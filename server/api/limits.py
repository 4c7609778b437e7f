"""What the operator allows a request, beside what the engine and the schema refuse anyway."""

from dataclasses import dataclass

from model_runtime.errors import RequestError
from server.api.generation_schema import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """Checked before anything is tokenised; times in seconds."""

    max_prompts: int
    max_n: int
    max_stop_strings: int  # of the request's own; a chat template may add some
    max_prompt_chars: int | None  # None: what the longest context could have
    max_unread_tokens: int  # outputs that a stream may lag behind
    sse_keep_alive_s: float | None  # of silence in a stream before a comment
    stall_s: float  # a step may take so long

    def check(self, body: GenerationRequest) -> None:
        """Raises RequestError, which names field, limit and value."""
        for param, most, what, given in (
            (body.prompt_field, self.max_prompts, "prompts", body.num_prompts),
            (body.answers_field, self.max_n, "answers", body.num_answers),
            ("stop", self.max_stop_strings, "strings", body.num_stop_strings),
        ):
            if given > most:
                raise RequestError(
                    f"`{param}` must be at most {most} {what}. Given: {given}", param=param
                )
