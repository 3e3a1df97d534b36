"""Resharding between the grids of two stages: an array's layout on the other grid, and which ranks send what.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import Any

from parlinalg.errors import LayoutError, PlanError
from parlinalg.exchange import Rect, meet, volume
from parlinalg.layout import Layout, coordinates
from parlinalg.nn import Module
from parlinalg.nn.images import Conv2d
from parlinalg.nn.linear import Linear
from parlinalg.schemes import Scheme

#: Dims of what passes between stages.
MOST_DIMS = 5

Table = dict[str, list[list[str]]]


def layout_table(scheme: Scheme | None, sizes: Mapping[str, int]) -> Table:
    """Return a scheme's layouts by name and dims, such as "residual 3", without axes of one rank; as JSON."""
    found: Table = {}
    if scheme is None:
        return found
    for ndim in range(1, MOST_DIMS + 1):
        for name in ("residual", "inner"):
            try:
                adapted = scheme.for_dims(ndim)
            except PlanError:
                continue
            layout: Layout = getattr(adapted, name)
            found[f"{name} {ndim}"] = _bare(layout, sizes)
            if ndim == 4:
                images = scheme.images("contract" if name == "residual" else "expand")
                found[f"{name} of images {ndim}"] = _bare(images, sizes)
            if ndim > 1:  # such as ids and masks: no features
                found[f"{name} without features {ndim - 1}"] = _bare(layout, sizes)[:-1]
    return found


def _bare(layout: Layout, sizes: Mapping[str, int]) -> list[list[str]]:
    return [[axis for axis in cut if sizes[axis] > 1] for cut in layout.dims]


def input_role(modules: Iterable[Module]) -> str | None:
    """Return the part of a block that the first product of these modules takes: the residual stream, or the inside."""
    for module in modules:
        for each in module.modules():
            if isinstance(each, Linear | Conv2d):
                return "inner" if each.kind == "contract" else "residual"
    return None


def counterpart_layout(
    layout: Layout, sizes: Mapping[str, int], table: Table, other_sizes: Mapping[str, int], other: Table,
    role: str | None, features: bool = True,
) -> Layout:  # fmt: skip
    """Return the layout on another grid that corresponds to a layout here.

    Parameters
    ----------
    layout, sizes, table
        The layout, the axes of its grid, and its scheme's table.
    other_sizes, other
        Those of the other grid.
    role : {"residual", "inner", None}
        The input of the stage there, which decides where the layout here is ambiguous.
    features : bool
        True if its last dim is one of features, where the layout does not tell: not so of ids and masks.

    Raises
    ------
    LayoutError
        If it is not a layout of the scheme here, and the grids differ.
    """
    if dict(sizes) == dict(other_sizes) and table == other:
        return layout
    bare, ndim = _bare(layout, sizes), layout.ndim
    if not ndim:
        return layout
    names = [name for name, dims in table.items() if dims == bare and name in other]
    names.sort(key=lambda name: (("without" in name) == features, name.split()[0] != role))
    if names:
        return Layout(*(tuple(cut) for cut in other[names[0]]))
    if not any(bare):
        return Layout.replicated(ndim)
    raise LayoutError(
        f"a stage gives an array of {ndim} dims in {layout!r}, and the grid of the next one, {dict(other_sizes)}, "
        f"differs from its own, {dict(sizes)}: cut the model where its scheme's residual stream or inside passes, "
        f"whose layouts here are {_layouts_of(table, ndim)}"
    )


def _layouts_of(table: Table, ndim: int) -> Any:
    return {name: Layout(*(tuple(c) for c in dims)) for name, dims in table.items() if len(dims) == ndim}


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
        """True if every rank's block goes as it is to the rank at the same place."""

    @cached_property
    def _holders(self) -> dict[Rect, list[int]]:
        found: dict[Rect, list[int]] = {}
        for place, rect in enumerate(self.haves):
            found.setdefault(rect, []).append(place)
        return found

    def _sender(self, holders: list[int], target: int) -> int:
        """Return the rank, of those that hold a rectangle, that sends it to a rank of the target."""
        if len(self.haves) == len(self.wants) and target in holders:
            return target
        return holders[target * len(holders) // len(self.wants)]

    def receives(self, place: int) -> Pieces:
        """Return the ranks of the source that send to this rank of the target, each with its part."""
        want = self.wants[place]
        if self.straight:
            return ((place, want),) if volume(want) else ()
        parts = ((self._sender(holders, place), meet(want, rect)) for rect, holders in self._holders.items())
        return tuple(sorted(((source, part) for source, part in parts if volume(part)), key=lambda piece: piece[0]))

    def sends(self, place: int) -> Pieces:
        """Return the ranks of the target that get something from this rank of the source, each with its part."""
        have = self.haves[place]
        if self.straight:
            return ((place, have),) if volume(have) else ()
        holders = self._holders[have]
        parts = ((target, meet(want, have)) for target, want in enumerate(self.wants))
        return tuple((t, part) for t, part in parts if volume(part) and self._sender(holders, t) == place)


def blocks(shape: tuple[int, ...], layout: Layout, sizes: Mapping[str, int]) -> list[Rect]:
    """Return every rank's block of an array, in the row-major order of the grid."""
    return [layout.block(shape, sizes, at) for at in coordinates(tuple(sizes), sizes)]


@lru_cache(maxsize=1024)
def cached_route(
    shape: tuple[int, ...], source: Layout, source_sizes: tuple[tuple[str, int], ...], target: Layout,
    target_sizes: tuple[tuple[str, int], ...],
) -> Route:  # fmt: skip
    """Return a `Route`, cached."""
    return Route(shape, source, dict(source_sizes), target, dict(target_sizes))
