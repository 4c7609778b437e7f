"""Fields of other servers' bodies, and what this server has for them.

Sources: vLLM's `protocol.py` of chats and of completions, llama.cpp's `server-schema.cpp`, SGLang's
`protocol.py` and its native `/generate`, text-generation-inference, and Anthropic's Messages.
"""

from collections.abc import Collection, Mapping

_LENGTHS = (
    *("n_predict", "num_predict", "max_new_tokens", "max_gen_len", "max_tokens_to_sample"),
    "max_completion_tokens",
)
_PROMPTS = ("input_ids", "inputs", "text")
_THOUGHTS = ("reasoning", "thinking", "reasoning_effort")
# What to write, which begins with a field of ours -> names of it, or of its like, elsewhere. A body
# that lacks the field says nothing.
_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "`max_tokens`": (*_LENGTHS, "max_output_tokens"),
    "`max_output_tokens`": (*_LENGTHS, "max_tokens"),
    "`min_tokens`": ("min_new_tokens",),
    "`temperature`": ("temp",),
    "`repetition_penalty`": ("repeat_penalty",),
    "`stop`": ("stop_sequences", "stop_strings"),
    "`stop_sequences`": ("stop", "stop_strings"),
    "`seed`": ("sampling_seed",),
    "`n`": ("n_cmpl", "num_return_sequences"),
    "`top_logprobs`": ("n_probs", "top_logprobs_num", "top_n_tokens"),
    "`logprobs`": ("n_probs", "top_logprobs", "top_logprobs_num", "top_n_tokens"),
    "`return_token_ids`": ("return_tokens",),
    "`request_id`": ("rid",),
    "`guided_regex`": ("regex",),
    "`guided_regex`, or `response_format` with a JSON schema": ("grammar", "ebnf"),
    "`response_format`": ("json_schema",),
    "`text`": ("response_format", "json_schema"),
    "`messages`": (*_PROMPTS, "input", "prompt"),
    "`prompt`": (*_PROMPTS, "input"),
    "`input`": (*_PROMPTS, "prompt", "messages"),
    "`instructions`": ("system",),
    "`system`": ("instructions",),
    "`messages` with a message of the role system": ("system", "instructions"),
    "`rope`": ("rope_scaling",),
    "`rope` with this field": ("rope_type", "positions"),
    "`reasoning_effort`": _THOUGHTS,
    "`reasoning`": _THOUGHTS,
    "`thinking`": _THOUGHTS,
    "`chat_template_kwargs` with this variable": ("enable_thinking",),
    "`stream_options` with this field": ("include_usage", "continuous_usage_stats"),
    "`add_special_tokens`": ("add_special",),
}
# Fields elsewhere that a body may lack, and that are no misspelling of the one beside them.
REAL_FIELDS = frozenset({"min_p", "min_tokens", "models", "top_a", "top_k", "typ_p"})


def written_instead(name: str, known: Collection[str]) -> str | None:
    """Return what a body with the `known` fields has for a field of another server, if anything."""
    found = (words for words, names in _WRITTEN.items() if name in names)
    return next((words for words in found if words.split("`")[1] in known), None)
