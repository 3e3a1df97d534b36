"""The terms of one gradient as they arrive, in whatever layouts, and how they become one block.

Terms of equal layouts are summed on arrival.  Of the others, those cut alike are first brought to one set of partial
axes, which costs nothing (a whole term counts on coordinate 0 only), and then moved once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.backend import namespace
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout
from parlinalg.redistribute import redistribute

Block = Any
Term = tuple[Block, Layout]


class Arrivals:
    """The sum of the terms of a gradient.

    Parameters
    ----------
    shape, layout, dtype, grid
        Those of the value whose gradient this is.  Its partial axes do not count: the gradient of a sum is that of each
        of its terms.
    """

    def __init__(self, shape: tuple[int, ...], layout: Layout, dtype: np.dtype[Any], grid: Grid) -> None:
        self.shape = shape
        self.layout = layout.with_partial(()) if layout.partial else layout
        self.dtype = dtype
        self.grid = grid
        self.goal = grid.effective(self.layout)
        self.terms: dict[Layout, Block] = {}
        self.mine: dict[Layout, bool] = {}
        """Whether a term's block is nobody else's, and may be added to."""

    def add(self, term: Term, *, owned: bool) -> None:
        """Take a term; `owned` says that its block is nobody else's."""
        block, layout = term
        layout = self.grid.effective(layout)
        if block.dtype != self.dtype:
            block, owned = block.astype(self.dtype), True
        held = self.terms.get(layout)
        if held is None:
            self.terms[layout], self.mine[layout] = block, owned
        else:
            first, more, into = (held, block, True) if self.mine[layout] else (block, held, owned)
            self.terms[layout], self.mine[layout] = _sum(first, more, into), True

    def unmoved(self, term: Term) -> Term | None:
        """What `summed` gives if this term is all; None if it would be moved or cast for that."""
        block, layout = term
        layout = self.grid.effective(layout)
        if block.dtype != self.dtype or layout.dims != self.goal.dims or set(layout.partial) & set(self.goal.cut_axes):
            return None
        return block, self.layout.with_partial(layout.partial)

    def own(self, block: Block) -> Block:
        """The block, copied if a term shares it with others or it cannot be written to."""
        shared = any(block is b and not self.mine[layout] for layout, b in self.terms.items())
        if shared or not block.flags.c_contiguous or block.base is not None:
            return block.copy(order="C")
        return block

    def settled(self) -> Term:
        """The gradient in the value's layout."""
        return self._moved(self.goal), self.layout

    def summed(self) -> Term:
        """The gradient with the value's cuts, left partial over axes that cut no dim of it."""
        cuts = self.goal.cut_axes
        partial: dict[str, None] = {}
        for layout in self.terms:
            partial.update(dict.fromkeys(a for a in layout.partial if a not in cuts))
        return self._moved(self.goal.with_partial(tuple(partial))), self.layout.with_partial(tuple(partial))

    def _moved(self, goal: Layout) -> Block:
        if not self.grid.inside:
            return self.grid.backend.zeros((0,) * len(self.shape), self.dtype)
        total, mine = self.terms.get(goal), self.mine.get(goal, False)
        alike: dict[tuple[Cut, ...], list[Layout]] = {}
        for layout in self.terms:
            if layout != goal:
                alike.setdefault(layout.dims, []).append(layout)
        for layouts in alike.values():
            block, layout, owned = self._together(layouts)
            moved = redistribute(block, layout, goal, self.shape, self.grid, owned=owned)
            owned = owned or (moved is not block and moved.base is None)  # a slice is a view of the block
            total, mine = (moved, owned) if total is None else (_sum(total, moved, mine), True)
        return total

    def _together(self, layouts: list[Layout]) -> tuple[Block, Layout, bool]:
        """Terms cut alike as one, partial over all axes over which one of them is."""
        first = layouts[0]
        if len(layouts) == 1:
            return self.terms[first], first, self.mine[first]
        partial: dict[str, None] = {}
        for layout in layouts:
            partial.update(dict.fromkeys(layout.partial))
        total: Block = None
        for layout in layouts:
            if any(self.grid.coords[a] for a in partial if a not in layout.partial):
                continue  # a whole term counts once
            block = self.terms[layout]
            total = block if total is None else total + block
        if total is None:
            total = self.grid.backend.zeros(self.terms[first].shape, self.dtype)
        return total, first.with_partial(tuple(partial)), all(total is not self.terms[layout] for layout in layouts)


def _sum(a: Block, b: Block, into: bool) -> Block:
    if into and a.ndim and getattr(a.flags, "writeable", True):  # CuPy's arrays always are
        a += b
        return a
    return namespace(a).asarray(a + b)
