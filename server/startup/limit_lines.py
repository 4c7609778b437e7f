"""The banner's lines about access, limits and chats, which hold for all deployments."""

from server.page.page_files import has_playground
from server.settings.load import ServeSettings
from server.settings.request_sections import GrammarSettings, LimitSettings

# Beside the sections of limits: what fills the queue, and what a chat may set.
_NAMES = (
    *("max_num_seqs", "max_queued_requests", "max_queued_prompt_tokens"),
    *LimitSettings.model_fields,
    *GrammarSettings.model_fields,
    "allowed_chat_template_kwargs",
)


def limit_lines(settings: ServeSettings) -> list[str]:
    """Return who may ask, what is logged and served, and the limits that were changed."""
    changed = [
        f"{name} {_text(getattr(settings, name))}"
        for name in _NAMES
        if getattr(settings, name) != ServeSettings.model_fields[name].default
    ]
    return [
        f"  access           {_access(settings)}",
        f"  access log       {settings.access_log}",
        f"  playground       {'at /playground/' if has_playground(settings) else 'not served'}",
        f"  limits           {'; '.join(changed) or 'all at their defaults'}",
    ]


def chat_line(tools: str | None, reasoning: str | None) -> list[str]:
    """Return the line about tool calls and reasoning; None: not known, and left out."""
    if tools is None:
        return [] if reasoning is None else [f"  reasoning        {reasoning}"]
    return [
        f"  tool calls       {tools}" + ("" if reasoning is None else f"; reasoning: {reasoning}")
    ]


def _access(settings: ServeSettings) -> str:
    """Describe keys and origins. The keys themselves are secrets."""
    with_key = bool(settings.api_key) or settings.api_key_file is not None
    who = "clients with a key" if with_key else "every client that reaches the port, without a key"
    if with_key and settings.open_metrics:
        who += " (/metrics without)"
    if settings.keys:
        who += f", bounded: {', '.join(entry.name for entry in settings.keys)}"
    origins = ", ".join(settings.allowed_origins)
    return f"{who}; web pages of {origins}" if origins else who


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return repr(value) if isinstance(value, str) else str(value)
