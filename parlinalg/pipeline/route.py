"""Which ranks of one grid send which rectangles of an array to which ranks of another.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

from parlinalg.exchange import Rect, meet, volume
from parlinalg.layout import Layout, coordinates

Pieces = tuple[tuple[int, Rect], ...]


class Route:
    """An array's way from a layout on one grid to a layout on another.

    A rank receives each element of its block once, of ranks that hold it from the one at its own place where the grids
    have as many ranks, else from one chosen so that they share the work: no rank receives more than its block.

    Parameters
    ----------
    shape : tuple of int
    source, target : Layout
        Nothing is partial.
    source_sizes, target_sizes : dict of str to int
        The axes of the grids.  Ranks are numbered by their place in the row-major order of their own grid.

    Examples
    --------
    >>> route = Route((4,), Layout("a"), {"a": 2}, Layout(None), {"b": 1})
    >>> route.receives(0)
    ((0, (range(0, 2),)), (1, (range(2, 4),)))
    >>> route.sends(1)
    ((0, (range(2, 4),)),)
    """

    def __init__(
        self, shape: tuple[int, ...], source: Layout, source_sizes: Mapping[str, int], target: Layout,
        target_sizes: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.haves = blocks(shape, source, source_sizes)
        self.wants = blocks(shape, target, target_sizes)
        self.straight = self.haves == self.wants
        """Whether every rank's block goes as it is to the rank at the same place."""

    @cached_property
    def _holders(self) -> dict[Rect, list[int]]:
        found: dict[Rect, list[int]] = {}
        for place, rect in enumerate(self.haves):
            found.setdefault(rect, []).append(place)
        return found

    def _sender(self, holders: list[int], target: int) -> int:
        """Which of the ranks that hold a rectangle sends it to a rank of the target."""
        if len(self.haves) == len(self.wants) and target in holders:
            return target
        return holders[target * len(holders) // len(self.wants)]

    def receives(self, place: int) -> Pieces:
        """The ranks of the source that send to this rank of the target, each with its part."""
        want = self.wants[place]
        if self.straight:
            return ((place, want),) if volume(want) else ()
        parts = ((self._sender(holders, place), meet(want, rect)) for rect, holders in self._holders.items())
        return tuple(sorted(((source, part) for source, part in parts if volume(part)), key=lambda piece: piece[0]))

    def sends(self, place: int) -> Pieces:
        """The ranks of the target that get something from this rank of the source, each with its part."""
        have = self.haves[place]
        if self.straight:
            return ((place, have),) if volume(have) else ()
        holders = self._holders[have]
        parts = ((target, meet(want, have)) for target, want in enumerate(self.wants))
        return tuple((t, part) for t, part in parts if volume(part) and self._sender(holders, t) == place)


def blocks(shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int]) -> list[Rect]:
    """Every rank's block of an array, in the row-major order of the grid."""
    return [layout.block(shape, sizes, at) for at in coordinates(tuple(sizes), sizes)]


@lru_cache(maxsize=1024)
def route(
    shape: tuple[int, ...], source: Layout, source_sizes: tuple[tuple[str, int], ...], target: Layout,
    target_sizes: tuple[tuple[str, int], ...],
) -> Route:  # fmt: skip
    """A `Route`, made once for each question."""
    return Route(shape, source, dict(source_sizes), target, dict(target_sizes))
