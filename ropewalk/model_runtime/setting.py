"""Declare a setting: a field of a pydantic model, with what help and docs say about it."""

from collections.abc import Collection
from typing import Any

from pydantic import Field


def setting(
    default: Any, text: str, *, unit: str = "", flags: Collection[str] = (), **limits: Any
) -> Any:
    """Declare a setting. `unit` is its value's unit or format, shown in help and docs.

    `flags`: those of vLLM, SGLang and llama.cpp that mean the same.
    """
    extra: dict[str, Any] = {"unit": unit, "flags": list(flags)}
    return Field(default, description=text, json_schema_extra=extra, **limits)
