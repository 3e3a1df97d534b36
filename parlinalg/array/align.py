"""Operands of unlike layouts are brought together, by one rule; `explicit()` makes unlike layouts an error.

The rule: an operation on several arrays runs in one layout of the broadcast shape.  Each operand proposes its own
layout, completed by what the others cut where it is whole; of these the one is taken into which the operands move the
fewest words, counted over all ranks; of equals the one that is cut by the most axes, then the first operand's.  Slicing
an operand that is whole is free.  An operand that is partial is summed on the way, unless the operation is linear.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from parlinalg.array.core import DistArray, mismatch, same_grid
from parlinalg.errors import LayoutError
from parlinalg.layout import Cut, Layout, coordinates
from parlinalg.moves import words

Shape = tuple[int, ...]
Items = tuple[tuple[str, int], ...]

COUNTED = 64
"""Ranks whose words are counted; of a larger grid so many, spread over it, stand for all."""

_explicit: ContextVar[bool | None] = ContextVar("explicit", default=None)
_training: ContextVar[bool] = ContextVar("training", default=False)


@contextmanager
def explicit(on: bool = True) -> Iterator[None]:
    """Within this context operations on arrays of unlike layouts raise a LayoutError instead of moving them.

    Layouts are compared by the names of their axes, axes of one rank included: so a program that runs on one rank
    within `explicit()` runs on any number of ranks without implicit communication.  The environment variable
    `PARLINALG_EXPLICIT=1` sets it for a whole program; `explicit(False)` allows implicit moves within.
    """
    token = _explicit.set(on)
    try:
        yield
    finally:
        _explicit.reset(token)


@contextmanager
def unmoved() -> Iterator[None]:
    """Within this context operations on arrays raise a LayoutError where elements would have to move: for tensors.

    Unlike within `explicit()` axes of one rank do not count.
    """
    token = _training.set(True)
    try:
        yield
    finally:
        _training.reset(token)


def is_explicit() -> bool:
    """Return True if unlike layouts are errors here."""
    return _training.get() or by_names()


def by_names() -> bool:
    """Return True if layouts that name other axes are errors here, on one rank too."""
    here = _explicit.get()
    return os.environ.get("PARLINALG_EXPLICIT", "") not in ("", "0") if here is None else here


def broadcast_shape(shapes: Sequence[Shape], name: str, error: type[Exception] = ValueError) -> Shape:
    """Return the shape to which these broadcast."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise error(f"{name}: shapes {', '.join(map(str, shapes))} do not broadcast together") from None


def together(
    arrays: Sequence[DistArray], name: str, into: Layout | None = None
) -> tuple[Shape, Layout, list[DistArray]]:
    """Return the broadcast shape of the arrays, one layout of it, and the arrays each in its part of that layout.

    Parameters
    ----------
    arrays : sequence of DistArray
        On one grid.  None of the arrays returned is partial.
    name : str
        The operation, for messages.
    into : Layout, optional
        The layout to take, of the broadcast shape.

    Raises
    ------
    LayoutError
        If an array has to move within `explicit()`.
    """
    grid = same_grid(arrays)
    first = arrays[0]
    if (
        into is None
        and not first.layout.partial
        and all(a.shape == first.shape and a.layout == first.layout for a in arrays[1:])
    ):
        return first.shape, first.layout, list(arrays)
    shape = broadcast_shape([a.shape for a in arrays], name)
    named, still = by_names(), is_explicit()
    layouts = [a.layout for a in arrays]
    if into is None:
        into = chosen(tuple(a.shape for a in arrays), tuple(layouts), shape, tuple(grid.sizes.items()))
    moved = []
    for a, have in zip(arrays, layouts, strict=True):
        want = narrowed(into, a.shape, shape)
        alike = grid.effective(have) == grid.effective(want)
        if still and (have if named else grid.effective(have)).partial:
            raise LayoutError(f"{name}: an operand is {have!r}, not summed yet; sum it by .redistribute({want!r})")
        if still and not (have == want if named else alike):
            raise mismatch(name, have, want)
        moved.append(a if alike else a.redistribute(want))
    return shape, into, moved


def narrowed(layout: Layout, shape: Shape, full: Shape) -> Layout:
    """Return the layout of an operand of `shape` by one of the broadcast shape `full`: broadcast dims are whole."""
    extra = len(full) - len(shape)
    return Layout(*(cut if n == m else () for cut, n, m in zip(layout.dims[extra:], shape, full[extra:], strict=True)))


@lru_cache(maxsize=4096)
def chosen(shapes: tuple[Shape, ...], layouts: tuple[Layout, ...], full: Shape, items: Items) -> Layout:
    """Return the layout of the broadcast shape in which operands of these shapes and layouts meet (see above)."""
    return min(candidates(shapes, layouts, full, items), key=lambda candidate: candidate.cost).layout


@dataclass(frozen=True)
class Candidate:
    """A layout in which the operands of an elementwise operation may meet, and what that costs.

    Attributes
    ----------
    operand : int
        The operand that proposes it, from 0.
    layout : Layout
        Of the broadcast shape.
    words : tuple of int
        For each operand the elements that all ranks together receive.
    pieces : int
        The number of pieces into which it cuts the array.
    """

    operand: int
    layout: Layout
    words: tuple[int, ...]
    pieces: int

    @property
    def cost(self) -> tuple[int, int]:
        """Candidates in order of this are those of the rule, the best first."""
        return sum(self.words), -self.pieces


def candidates(
    shapes: Sequence[Shape], layouts: Sequence[Layout], full: Shape, items: Items
) -> list[Candidate]:  # fmt: skip
    """Return the layouts that the operands of these shapes propose, each with the words that it moves."""
    sizes, found = dict(items), []
    for i in range(len(shapes)):
        order = [i, *(j for j in range(len(shapes)) if j != i)]
        layout = _completed([(shapes[j], layouts[j]) for j in order], full)
        moved = tuple(
            total_words(have, narrowed(layout, shape, full), shape, items)
            for shape, have in zip(shapes, layouts, strict=True)
        )
        found.append(Candidate(i, layout, moved, math.prod(sizes[a] for a in layout.cut_axes)))
    return found


@dataclass(frozen=True)
class ElementwisePlan:
    """The plan of an elementwise operation on operands of unlike layouts, before it runs.

    Attributes
    ----------
    shapes, layouts
        Of the operands.
    sizes : dict of str to int
        The grid's axes.
    shape : tuple of int
        The broadcast shape.
    layout : Layout
        The layout of the result, into which the operands are brought.
    candidates : list of Candidate
        The layouts among which it was chosen.
    """

    shapes: tuple[Shape, ...]
    layouts: tuple[Layout, ...]
    sizes: dict[str, int]
    shape: Shape
    layout: Layout
    candidates: list[Candidate]

    def words(self, coords: Mapping[str, int]) -> tuple[int, ...]:
        """Return for each operand the elements that the rank at `coords` receives: as the ledger counts."""
        return tuple(
            words(have, narrowed(self.layout, shape, self.shape), shape, self.sizes, coords)
            for shape, have in zip(self.shapes, self.layouts, strict=True)
        )

    def explain(self) -> str:
        """Return the layout, the words, and the layouts that lost, one a line with the reason."""
        every = [self.words(at) for at in coordinates(tuple(self.sizes), self.sizes)]
        moved = [sum(each) for each in zip(*every, strict=True)]
        parts = ", ".join(f"operand {i + 1}: {n:,}" for i, n in enumerate(moved) if n)
        operands = [f"{shape} in {layout!r}" for shape, layout in zip(self.shapes, self.layouts, strict=True)]
        most = max(map(sum, every))
        rows = [
            *((f"operand {i + 1}", text) for i, text in enumerate(operands)),
            ("grid", f"{self.sizes}, {len(every)} rank{'s' * (len(every) > 1)}"),
            ("result", f"{self.shape} in {self.layout!r}"),
            ("words", f"{sum(moved):,} received by all ranks, at most {most:,} by one{f' ({parts})' * bool(parts)}"),
        ]
        lines = [f"{name:<11}{text}" for name, text in rows]
        best = min(self.candidates, key=lambda candidate: candidate.cost)
        lines += ["candidates", *(f"  operand {c.operand + 1}: {c.layout!r} {_why(c, best)}" for c in self.candidates)]
        return "\n".join(lines)


def _why(candidate: Candidate, best: Candidate) -> str:
    """Return why a candidate was chosen, or lost."""
    total, least = sum(candidate.words), sum(best.words)
    moved = f"moves {total:,} words"
    if candidate is best:
        return f"{moved}: chosen"
    if candidate.layout == best.layout:
        return f"{moved}: the same layout"
    if total != least:
        return f"{moved}, {total - least:,} more"
    if candidate.pieces != best.pieces:
        return f"{moved}, as few, but cuts the array into {candidate.pieces} pieces instead of {best.pieces}"
    return f"{moved}, as few: a tie, broken towards the first operand"


def plan_elementwise(
    *operands: DistArray | tuple[Sequence[int], Layout], grid: Mapping[str, int] | None = None
) -> ElementwisePlan:
    """Return the plan of an elementwise operation on these operands; nothing moves.

    Parameters
    ----------
    *operands : DistArray, or tuple of a shape and a Layout
        An operation that is linear leaves a partial operand as it is; others sum it, as here.
    grid : dict of str to int, optional
        The axes' sizes, where no operand is an array.

    Raises
    ------
    LayoutError
        If a layout does not fit its shape or the grid, or the shapes do not broadcast together.

    Examples
    --------
    >>> import parlinalg as pla
    >>> rows = pla.Layout("r", None)
    >>> print(plan_elementwise(((6, 4), rows), ((6, 4), rows.T), grid={"r": 2}).explain())
    operand 1  (6, 4) in Layout('r', None)
    operand 2  (6, 4) in Layout(None, 'r')
    grid       {'r': 2}, 2 ranks
    result     (6, 4) in Layout('r', None)
    words      12 received by all ranks, at most 6 by one (operand 2: 12)
    candidates
      operand 1: Layout('r', None) moves 12 words: chosen
      operand 2: Layout(None, 'r') moves 12 words, as few: a tie, broken towards the first operand
    """
    arrays = [a for a in operands if isinstance(a, DistArray)]
    sizes = dict(same_grid(arrays).sizes if arrays else grid or {})
    given = [(a.shape, a.layout) if isinstance(a, DistArray) else (tuple(a[0]), a[1]) for a in operands]
    if not given:
        raise ValueError("an elementwise operation has at least one operand")
    for shape, layout in given:
        layout.check(shape, sizes)
    shapes, layouts = (tuple(each) for each in zip(*given, strict=True))
    full, items = broadcast_shape(shapes, "plan_elementwise", LayoutError), tuple(sizes.items())
    into = chosen(shapes, layouts, full, items)
    if not layouts[0].partial and all(each == given[0] for each in given):
        into = layouts[0]
    return ElementwisePlan(shapes, layouts, sizes, full, into, candidates(shapes, layouts, full, items))


def _completed(operands: Sequence[tuple[Shape, Layout]], full: Shape) -> Layout:
    """Return the first operand's layout, with dims that it leaves whole cut as by the next ones where axes are free."""
    dims: list[Cut] = [()] * len(full)
    used: set[str] = set()
    for shape, layout in operands:
        extra = len(full) - len(shape)
        for d, cut in enumerate(layout.dims):
            free = tuple(a for a in cut if a not in used)
            if shape[d] == full[extra + d] and not dims[extra + d] and free == cut:
                dims[extra + d] = cut
                used.update(cut)
    return Layout(*dims)


def spread(shape: Sequence[int], axes: Sequence[str], dims: Sequence[Cut] = ()) -> Layout:
    """Return a layout in which these axes cut `shape`: each in turn the dim with the longest pieces."""
    cuts = [tuple(c) for c in dims] or [()] * len(shape)
    lengths = [-(-n // 2 ** len(c)) for n, c in zip(shape, cuts, strict=True)]
    for axis in axes:
        if shape:
            longest = max(range(len(shape)), key=lambda d: lengths[d])
            cuts[longest] = (*cuts[longest], axis)
            lengths[longest] = -(-lengths[longest] // 2)
    return Layout(*cuts)


@lru_cache(maxsize=4096)
def total_words(src: Layout, dst: Layout, shape: Shape, items: Items) -> int:
    """Return the number of elements that all ranks together receive in a move (on large grids in proportion)."""
    if src == dst:
        return 0
    sizes = dict(items)
    every = list(coordinates(tuple(sizes), sizes)) if math.prod(sizes.values()) <= COUNTED else _spread(sizes)
    return sum(words(src, dst, shape, sizes, at) for at in every)


def _spread(sizes: dict[str, int]) -> list[dict[str, int]]:
    ranks = math.prod(sizes.values())
    found = []
    for i in range(COUNTED):
        rank, at = i * ranks // COUNTED, {}
        for axis in reversed(sizes):
            rank, at[axis] = divmod(rank, sizes[axis])
        found.append(at)
    return found
