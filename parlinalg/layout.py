"""Layouts: which axes of a processor grid cut which dims of an array.  Pure data, no MPI, no NumPy.

A dim of `n` items cut by an axis of `p` ranks falls into `p` balanced pieces whose lengths differ by at most one
(`n mod p` pieces are one longer, and come first); cut by several axes it is cut again piece by piece, outermost axis
first.  Pieces of length zero are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from parlinalg.errors import LayoutError

Cut = tuple[str, ...]
AxisSpec = str | Iterable[str] | None


def as_cut(spec: AxisSpec) -> Cut:
    """Return the tuple of axes of `None` (no axis), `"r"` (one) or `("d", "r")` (several, outermost first)."""
    if spec is None:
        return ()
    if isinstance(spec, str):
        return (spec,) if spec else ()
    cut = tuple(spec)
    for axis in cut:
        if not isinstance(axis, str) or not axis:
            raise LayoutError(f"an axis of a layout is a non-empty name, not {axis!r}")
    return cut


@dataclass(frozen=True, init=False)
class Layout:
    """For every dim of an array, the grid axes that cut it.

    Parameters
    ----------
    *dims : None, str or tuple of str
        For each dim the axes that cut it, outermost first; `None` leaves the dim whole.
    partial : str or tuple of str
        Axes over which terms are not summed yet: the value is the sum of the blocks along these axes.

    An axis named nowhere replicates the array.  Layouts are frozen, hashable and compare by value.

    Raises
    ------
    LayoutError
        If an axis is named twice.

    Examples
    --------
    >>> Layout("r", None, ("d", "c"))
    Layout('r', None, ('d', 'c'))
    >>> Layout("r", "c").T
    Layout('c', 'r')
    """

    dims: tuple[Cut, ...]
    partial: Cut

    def __init__(self, *dims: AxisSpec, partial: AxisSpec = ()) -> None:
        object.__setattr__(self, "dims", tuple(as_cut(d) for d in dims))
        object.__setattr__(self, "partial", tuple(sorted(as_cut(partial))))
        object.__setattr__(self, "_hash", hash((self.dims, self.partial)))
        seen: set[str] = set()
        for axis in chain(*self.dims, self.partial):
            if axis in seen:
                raise LayoutError(
                    f"{self!r} names axis {axis!r} twice; an axis cuts at most one dim, once, and is then not partial"
                )
            seen.add(axis)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.dims, self.partial)  # hashes of strings differ from process to process

    @classmethod
    def replicated(cls, ndim: int) -> Layout:
        """Return the layout of an array of `ndim` dims of which every rank holds all elements."""
        return cls(*((),) * ndim)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def cut_axes(self) -> Cut:
        """All axes that cut a dim, in the order of the dims."""
        return tuple(chain(*self.dims))

    @property
    def axes(self) -> Cut:
        """All axes the layout names: those that cut, then the partial ones."""
        return self.cut_axes + self.partial

    @property
    def T(self) -> Layout:
        """The layout of the transposed array: the dims in reverse order."""
        return Layout(*self.dims[::-1], partial=self.partial)

    def where(self, axis: str) -> int | None:
        """Return the dim that `axis` cuts, or None."""
        return next((d for d, cut in enumerate(self.dims) if axis in cut), None)

    def permuted(self, order: Iterable[int]) -> Layout:
        """Return the layout after `transpose(order)`."""
        return Layout(*(self.dims[d] for d in order), partial=self.partial)

    def with_dim(self, dim: int, cut: AxisSpec) -> Layout:
        """Return the same layout with `dim` cut by `cut` instead."""
        dim %= len(self.dims)
        return Layout(*self.dims[:dim], cut, *self.dims[dim + 1 :], partial=self.partial)

    def with_partial(self, partial: AxisSpec) -> Layout:
        """Return the same cuts with other partial axes."""
        if partial == self.partial:
            return self
        return Layout(*self.dims, partial=partial)

    def without(self, axes: Iterable[str]) -> Layout:
        """Return the same layout with these axes removed wherever they stand."""
        drop = set(axes)
        return Layout(
            *([a for a in cut if a not in drop] for cut in self.dims),
            partial=[a for a in self.partial if a not in drop],
        )

    def renamed(self, names: Mapping[str, str]) -> Layout:
        """Return the same layout with axes renamed by `names`; axes not in it keep their names."""
        return Layout(
            *([names.get(a, a) for a in cut] for cut in self.dims), partial=[names.get(a, a) for a in self.partial]
        )

    def check(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> None:
        """Raise a LayoutError unless this layout fits an array of `shape` on a grid with these axes."""
        if len(shape) != self.ndim:
            raise LayoutError(
                f"{self!r} describes {self.ndim} dims, but the array has shape {shape}: give one entry a dim, None for "
                "a whole one"
            )
        for axis in self.axes:
            if axis not in sizes:
                raise LayoutError(f"{self!r} names axis {axis!r}, but the grid has the axes {dict(sizes)}")

    def block(self, shape: tuple[int, ...], sizes: Mapping[str, int], coords: Mapping[str, int]) -> tuple[range, ...]:
        """Return for each dim the range of global indices held by the rank at `coords`."""
        return tuple(span(n, cut, sizes, coords) for n, cut in zip(shape, self.dims, strict=True))

    def block_shape(
        self, shape: tuple[int, ...], sizes: Mapping[str, int], coords: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Return the shape of the block held by the rank at `coords`."""
        return tuple(len(r) for r in self.block(shape, sizes, coords))

    def __repr__(self) -> str:
        def one(cut: Cut) -> str:
            return "None" if not cut else repr(cut[0]) if len(cut) == 1 else repr(cut)

        parts = [one(cut) for cut in self.dims]
        if self.partial:
            parts.append(f"partial={one(self.partial)}")
        return f"Layout({', '.join(parts)})"


def _unpickled(dims: tuple[Cut, ...], partial: Cut) -> Layout:
    return Layout(*dims, partial=partial)


def piece(n: int, parts: int, index: int) -> range:
    """Return the indices of piece `index` of `n` items cut into `parts` balanced pieces."""
    q, r = divmod(n, parts)
    start = index * q + min(index, r)
    return range(start, start + q + (index < r))


def pieces(n: int, parts: int) -> list[int]:
    """Return the lengths of all balanced pieces.

    >>> pieces(11, 4)
    [3, 3, 3, 2]
    """
    return [len(piece(n, parts, i)) for i in range(parts)]


def span(n: int, cut: Cut, sizes: Mapping[str, int], coords: Mapping[str, int]) -> range:
    """Return the indices of a dim of `n` items that the rank at `coords` holds when `cut` cuts the dim."""
    inside = range(n)
    for axis in cut:
        part = piece(len(inside), sizes[axis], coords[axis])
        inside = inside[part.start : part.stop]
    return inside


def cut_lengths(n: int, cut: Cut, sizes: Mapping[str, int]) -> list[int]:
    """Return the lengths of all pieces of a dim of `n` items cut by `cut`, in row-major order of coordinates.

    >>> cut_lengths(5, ("a", "b"), {"a": 2, "b": 2})
    [2, 1, 1, 1]
    """
    lengths = [n]
    for axis in cut:
        lengths = [p for length in lengths for p in pieces(length, sizes[axis])]
    return lengths


def coordinates(axes: Cut, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Return all coordinates over these axes, in row-major order."""
    for values in product(*(range(sizes[a]) for a in axes)):
        yield dict(zip(axes, values, strict=True))


def index_of(axes: Cut, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    """Return the row-major index of `coords` among all coordinates over `axes`."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + coords[axis]
    return index


def span_of(axes: Cut, sizes: Mapping[str, int]) -> int:
    """Return the number of ranks that these axes span."""
    return math.prod(sizes[a] for a in axes)
