"""Groups of layers whose keys and values share pages, where some layers read a window only.

A page holds the layers of one group for `page_size` positions. All groups have the same number of
places for layers, so all pages have the same size, and one pool serves them. A sequence has a page
table for each group, and the layers of a group read all keys or one window. A group with a window
gives pages back as soon as no later query reads them.

Planning imports this module, so it knows no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ropewalk.model_runtime.errors import ModelError
from ropewalk.rope import ALL_LAYERS, Profile

MOST_GROUPS = 16  # each has tables and lists of its own in every step
_MOST_SPARE = 8  # at most one place in so many may be without a layer
ENDLESS = 2**31 - 1  # positions: a cache that any length fits


class LayerShape(Protocol):
    """The cache shape of a layer."""

    @property
    def num_key_heads(self) -> int:
        """K, key heads."""

    @property
    def key_dim(self) -> int:
        """D, dimensions of a key."""

    @property
    def value_dim(self) -> int:
        """V, dimensions of a value."""


@dataclass(frozen=True, slots=True)
class PageGroups:
    """The layers of each group, and the window that they read."""

    layers: tuple[tuple[int, ...], ...]
    windows: tuple[int | None, ...]  # keys that a query sees, itself included; None: all

    @property
    def num_groups(self) -> int:
        return len(self.layers)

    @property
    def has_windows(self) -> bool:
        """Return whether a group gives pages back."""
        return any(self.windows)

    def text(self) -> str:
        """Describe which layers keep how many tokens."""
        by_window: dict[int, int] = {}
        for layers, window in zip(self.layers, self.windows, strict=True):
            if window is not None:
                by_window[window] = by_window.get(window, 0) + len(layers)
        kept = " and ".join(f"{count} keep {window} tokens" for window, count in by_window.items())
        return f"of {sum(map(len, self.layers))} layers {kept}"

    def window_pages(self, page_size: int, max_chunk: int) -> int:
        """Return the most pages that all groups with a window hold of a sequence."""
        windows = (each for each in self.windows if each is not None)
        return sum(pages_of_window(each, page_size, max_chunk) for each in windows)

    def num_held(
        self, num_pages: int, page_size: int, max_chunk: int, num_whole: int | None = None
    ) -> int:
        """Return the most pages that a sequence of `num_pages` x page_size positions holds.

        A step computes at most `max_chunk` of its tokens.
        `num_whole`: those of a group without a window, if it does not keep all.
        """
        return sum(
            (num_pages if num_whole is None else num_whole)
            if window is None
            else min(num_pages, pages_of_window(window, page_size, max_chunk))
            for window in self.windows
        )

    def longest(self, num_pages: int, page_size: int, max_chunk: int) -> int:
        """Return the positions of the longest sequence that `num_pages` pages hold alone."""
        is_endless = None not in self.windows
        if is_endless and self.window_pages(page_size, max_chunk) <= num_pages:
            return ENDLESS
        low, high = 0, num_pages
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_held(middle, page_size, max_chunk) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low * page_size

    def room(self, num_pages: int, page_size: int, max_chunk: int) -> int:
        """Return the positions that the other groups hold beside those with a full window."""
        num_left = num_pages - self.window_pages(page_size, max_chunk)
        num_whole = self.windows.count(None)
        if num_left < 0:
            return 0
        return num_left // num_whole * page_size if num_whole else ENDLESS


ONE_GROUP = PageGroups(((),), (None,))  # of all layers, whatever they are; it keeps every page


def pages_of_window(window: int, page_size: int, max_chunk: int) -> int:
    """Return the most pages that a group with a window holds of a sequence.

    A step computes at most `max_chunk` of its tokens. A page is released a page late at most.
    """
    return -(-(window + max_chunk) // page_size) + 2


def refuse_releases(profiles: Iterable[Profile], layer_types: Iterable[str | None]) -> None:
    """Raise ModelError if a layer reads every key and a profile's positions release pages.

    `layer_types`: the names of the layers' rotary tables; None: a layer does not rotate.
    """
    is_one_table = set(layer_types) == {ALL_LAYERS}
    for profile in profiles:
        if profile.positions is not None and profile.positions.kept and not is_one_table:
            raise ModelError(
                f"positions: {profile.positions.method} is not served for a model with layers "
                "that rotate otherwise or not at all, because those read every key"
            )


def group_layers(
    windows: Mapping[int, int | None], shapes: Mapping[int, LayerShape], max_len: int
) -> tuple[PageGroups, str | None]:
    """Return the groups of a model's layers, and why its windows are not held, if they are not.

    `windows`, `shapes`: of each layer with a cache. A window of `max_len` or more counts as none.
    """
    seen = {layer: None if not each or each >= max_len else each for layer, each in windows.items()}
    if not any(seen.values()):
        return ONE_GROUP, None
    alike = {(each.num_key_heads, each.key_dim, each.value_dim) for each in shapes.values()}
    if len(alike) > 1:
        return ONE_GROUP, "its layers differ in heads or dimensions"
    kinds: dict[int | None, list[int]] = {}
    for layer in sorted(seen):
        kinds.setdefault(seen[layer], []).append(layer)
    kinds = dict(sorted(kinds.items(), key=lambda each: each[0] or 0))
    size, num_groups = _group_size([len(each) for each in kinds.values()])
    if num_groups > MOST_GROUPS:
        return ONE_GROUP, (
            f"groups of layers alike would be {num_groups}, and at most {MOST_GROUPS} are served"
        )
    groups, windows_of = [], []
    for window, layers in kinds.items():
        for begin in range(0, len(layers), size):
            groups.append(tuple(layers[begin : begin + size]))
            windows_of.append(window)
    return PageGroups(tuple(groups), tuple(windows_of)), None


def _group_size(counts: Sequence[int]) -> tuple[int, int]:
    """Return the layers of a group, and the number of groups, for the numbers of layers alike.

    Few places are without a layer, and among such sizes the largest is taken. If every size makes
    too many groups or too many such places, then it is the one without such places.
    """
    num_layers = sum(counts)
    ranked = []
    for size in range(1, max(counts) + 1):
        num_groups = sum(-(-each // size) for each in counts)
        num_spare = num_groups * size - num_layers
        is_served = num_groups <= MOST_GROUPS and num_spare * _MOST_SPARE <= num_layers
        ranked.append((not is_served, num_spare, -size, num_groups))
    _, _, negative, num_groups = min(ranked)
    return -negative, num_groups
