"""Whether layers with a window hold their window only, and what a plan says of it."""

from collections.abc import Mapping

from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.page_groups import LayerShape, PageGroups, group_layers


def planned_groups(
    windows: Mapping[int, int | None],
    shapes: Mapping[int, LayerShape],
    max_len: int,
    *,
    has_states: bool,
) -> tuple[PageGroups | None, str | None]:
    """Return the groups of layers that share pages, or why windows are not held.

    None, None: no layer has a window below `max_len`.
    """
    found = group_layers(windows, shapes, max_len)
    if found == (None, None):
        return found
    if has_states:
        return None, "its other layers keep states"
    return found


def padded(token_bytes: int, groups: PageGroups | None) -> int:
    """Return the bytes of a token in all layers, with places in pages that no layer has."""
    return token_bytes if groups is None else groups.padded(token_bytes)


def windows_beside(config: EngineConfig) -> str:
    """Return a clause with the pages of windows; empty if none are held."""
    if config.page_groups is None:
        return ""
    step = config.page_size, config.max_num_batched_tokens
    num_pages = config.page_groups.window_pages(*step)
    return f", beside {num_pages} pages of the layers with a window"
