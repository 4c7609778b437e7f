"""Text files that settings name."""

from pathlib import Path

from server.settings.config_file import why_unreadable
from server.settings.load import ServeSettings, SettingsError


def read_named(setting: str, path: Path) -> str:
    """Return the text of the file that a setting names. Raises SettingsError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{setting}: cannot read {path}: {why_unreadable(error)}") from error


def chat_template_text(settings: ServeSettings) -> str | None:
    """Return the operator's chat template; None if none is named. Raises SettingsError."""
    if settings.chat_template is None:
        return None
    return read_named("chat_template", settings.chat_template)
