"""All wrong fields of one deployment, where building it stops at the first one."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions
from ropewalk.rope import RopeConfigError

_OPTIONS = {each.name for each in fields(DeploymentOptions)} - {"rope_scaling", "page_size"}
_DECIDING = {"rope_type", "rope_tiers"}  # most other fields depend on them
_ANY_FACTOR = 4.0  # in the place of a wrong one, without which a block may not be read


def wrong_fields(
    options: DeploymentOptions, build: Callable[[DeploymentOptions], object]
) -> list[RopeConfigError]:
    """Return an error for each field that `build` refuses; empty if it builds.

    Building is repeated without the fields that were wrong. Fields that depend on these are not
    judged.
    """
    found: list[RopeConfigError] = []
    is_block_wrong = False
    while True:
        try:
            build(options)
        except RopeConfigError as error:
            block = options.rope_scaling or {}
            is_in_block = block.get(error.field) is not None
            is_known = error.field in {each.field for each in found}
            if found and (is_known or (is_block_wrong and not is_in_block)):
                return found
            found.append(error)
            is_block_wrong = is_block_wrong or is_in_block
            left = _without(options, block, error.field)
            if left is None:
                return found
            options = left
        else:
            return found


def _without(
    options: DeploymentOptions, block: Mapping[str, Any], field: str
) -> DeploymentOptions | None:
    """Return the options without a field; None if the others cannot be judged then."""
    if field in _DECIDING:
        return None
    if block.get(field) is not None:
        left = {name: value for name, value in block.items() if name != field}
        return replace(
            options, rope_scaling=left | ({"factor": _ANY_FACTOR} if field == "factor" else {})
        )
    if field not in _OPTIONS or getattr(options, field) is None:
        return None
    left_out: dict[str, Any] = {field: None}
    return replace(options, **left_out)
