"""The access policy built from the settings: API keys, key file, origins and body limits."""

from typing import TYPE_CHECKING

from server.page.page_files import has_playground
from server.settings.load import ServeSettings, SettingsError

if TYPE_CHECKING:
    from server.app import AccessPolicy


def api_keys_of(settings: ServeSettings) -> list[str]:
    """Return the keys of the settings and of the key file.

    Raises SettingsError if the key file cannot be read or holds no key, or if a key is empty.
    """
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        try:
            lines = settings.api_key_file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"api_key_file: cannot read {settings.api_key_file}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            # Without a key the server would accept every client.
            raise SettingsError(f"api_key_file: {settings.api_key_file} holds no key")
        keys += found
    if any(not key for key in keys):
        raise SettingsError("api_key: a key must not be empty")
    return keys


def access_policy_of(settings: ServeSettings, api_keys: list[str]) -> "AccessPolicy":
    """Build the access policy from the settings and the keys that they name."""
    # Imported here, because the keys are read before FastAPI is imported.
    from server.app import AccessPolicy  # noqa: PLC0415
    from server.middleware.body_limits import BodyLimits  # noqa: PLC0415

    return AccessPolicy(
        api_keys=api_keys,
        open_metrics=settings.open_metrics,
        has_playground=has_playground(settings),
        allowed_origins=settings.allowed_origins,
        body=BodyLimits(
            settings.max_body_bytes,
            settings.max_json_depth,
            settings.max_headers,
            settings.body_timeout_seconds,
        ),
    )
