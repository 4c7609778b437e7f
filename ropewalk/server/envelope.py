"""OpenAI's error body. This module imports nothing heavy: the port answers before the imports."""

from typing import Any


def envelope(
    message: str,
    kind: str,
    *,
    param: str | None = None,
    code: str | None = None,
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build OpenAI's error body.

    Names from a client may contain lone surrogates, which JSON cannot encode, so they are escaped.
    """
    return {
        "error": {
            "message": _encodable(message),
            "type": kind,
            "param": None if param is None else _encodable(param),
            "code": code,
            **(details or {}),
        }
    }


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
