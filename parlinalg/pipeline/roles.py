"""How an array that one grid's scheme cuts is cut by another's: by the part it plays in a model.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parlinalg.errors import LayoutError, PlanError
from parlinalg.layout import Layout
from parlinalg.nn import Module
from parlinalg.nn.images import Conv2d
from parlinalg.nn.linear import Linear
from parlinalg.schemes import Scheme

#: Dims of what passes between stages.
MOST_DIMS = 5

Table = dict[str, list[list[str]]]


def table_of(scheme: Scheme | None, sizes: Mapping[str, int]) -> Table:
    """The layouts of a scheme by name and dims, "residual 3" for one, without axes of one rank; as JSON carries it."""
    found: Table = {}
    for ndim in range(MOST_DIMS if scheme is not None else 0):
        for name in ("residual", "inner"):
            try:
                adapted = scheme.for_dims(ndim + 1) if scheme is not None else None
            except PlanError:
                continue
            layout: Layout = getattr(adapted, name)
            found[f"{name} {ndim + 1}"] = _bare(layout, sizes)
            if ndim == 3 and scheme is not None:
                found[f"{name} of images {ndim + 1}"] = _bare(
                    scheme.images("contract" if name == "residual" else "expand"), sizes
                )
            if ndim:  # such as ids and masks: no features
                found[f"{name} without features {ndim}"] = _bare(layout, sizes)[:-1]
    return found


def _bare(layout: Layout, sizes: Mapping[str, int]) -> list[list[str]]:
    return [[axis for axis in cut if sizes[axis] > 1] for cut in layout.dims]


def first_role(modules: Iterable[Module]) -> str | None:
    """What the first product of these modules takes: the residual stream, or what is inside of a block."""
    for module in modules:
        for each in module.modules():
            if isinstance(each, Linear | Conv2d):
                return "inner" if each.kind == "contract" else "residual"
    return None


def translated(
    layout: Layout, sizes: Mapping[str, int], table: Table, other_sizes: Mapping[str, int], other: Table,
    takes: str | None, features: bool = True,
) -> Layout:  # fmt: skip
    """The layout on another grid of an array that has this one here.

    Parameters
    ----------
    layout, sizes, table
        The layout, the axes of its grid, and its scheme's table.
    other_sizes, other
        Those of the other grid.
    takes : {"residual", "inner", None}
        What the stage there takes, which decides where the layout here does not tell.
    features : bool
        Whether its last dim is one of features, where the layout does not tell: not so of ids and masks.

    Raises
    ------
    LayoutError
        If it is none of the layouts that the scheme here has, and the grids differ.
    """
    if dict(sizes) == dict(other_sizes) and table == other:
        return layout
    bare, ndim = _bare(layout, sizes), layout.ndim
    if not ndim:
        return layout
    names = [name for name, dims in table.items() if dims == bare and name in other]
    names.sort(key=lambda name: (("without" in name) == features, name.split()[0] != takes))
    if names:
        return Layout(*(tuple(cut) for cut in other[names[0]]))
    if not any(bare):
        return Layout.whole(ndim)
    raise LayoutError(
        f"a stage gives an array of {ndim} dims in {layout!r}, and the grid of the next one, {dict(other_sizes)}, "
        f"differs from its own, {dict(sizes)}: cut the model where its scheme's residual stream or inside passes, "
        f"whose layouts here are {_told(table, ndim)}"
    )


def _told(table: Table, ndim: int) -> Any:
    return {name: Layout(*(tuple(c) for c in dims)) for name, dims in table.items() if len(dims) == ndim}
