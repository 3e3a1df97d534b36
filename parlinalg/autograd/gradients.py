"""Gradients that add up: the sum of terms in whatever layouts, and terms that are scattered meanwhile.

Terms of equal layouts are summed on arrival.  Of the others, those cut alike are first brought to one set of partial
axes, which costs nothing (a whole term counts on coordinate 0 only), and then moved once.

A weight that rests cut along axes that replicate it at work (ZeRO-3) has its gradient reduce-scattered over them.  The
walk starts that when the term is there, or together with others of its block, and takes it in later: at points that
depend on global shapes alone, so that all ranks communicate in one order.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parlinalg.backend import namespace
from parlinalg.backend.kernels.rows import add_to
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, span_of
from parlinalg.matmul.local import DeferredGemm
from parlinalg.redistribute import Move, redistribute, start

if TYPE_CHECKING:
    from parlinalg.autograd.storage import Gatherer
    from parlinalg.autograd.tape import Node, Walk

Block = Any
Term = tuple[Block, Layout]


class GradientAccumulator:
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
        """True for terms whose block has no other user and may be added to in place."""

    def add(self, term: Term, *, owned: bool) -> None:
        """Take a term; `owned` says that its block is nobody else's."""
        block, layout = term
        layout = self.grid.effective(layout)
        if block.dtype != self.dtype:
            block, owned = cast(block, self.dtype), True
        held = self.terms.get(layout)
        if held is None:
            self.terms[layout], self.mine[layout] = block, owned
        else:
            first, more, into = (held, block, True) if self.mine[layout] else (block, held, owned)
            self.terms[layout], self.mine[layout] = _sum(first, more, into), True

    def unmoved(self, term: Term) -> Term | None:
        """Return the result of `summed` for this term alone; None if the term would have to be moved or cast."""
        block, layout = term
        layout = self.grid.effective(layout)
        if block.dtype != self.dtype or layout.dims != self.goal.dims or set(layout.partial) & set(self.goal.cut_axes):
            return None
        return block, self.layout.with_partial(layout.partial)

    def own(self, block: Block) -> Block:
        """Return the block, copied if a term shares it with others or it cannot be written to."""
        shared = any(block is b and not self.mine[layout] for layout, b in self.terms.items())
        if shared or not block.flags.c_contiguous or block.base is not None:
            return block.copy(order="C")
        return block

    def settled(self) -> Term:
        """Return the gradient in the value's layout."""
        return self._moved(self.goal), self.layout

    def summed(self) -> Term:
        """Return the gradient with the value's cuts, left partial over axes that cut no dim of it."""
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
        """Return terms with the same cuts as one, partial over all axes over which one of them is."""
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


def cast(block: Block, dtype: np.dtype[Any]) -> Block:
    """Return a term of a gradient in the dtype of its value; of a real value's the real part counts."""
    return (block.real if block.dtype.kind == "c" != dtype.kind else block).astype(dtype)


def conjugated(derivative: Any, g: Block, *held: Any) -> Any:
    """Return the gradient that a rule gives, which multiplies `g` by the derivative of a holomorphic function.

    The gradient by a complex z = u + iv of a real number L is ∂L/∂u + i ∂L/∂v, as in PyTorch: the direction in which L
    grows fastest.  So the derivative enters conjugated.
    """
    return derivative(g.conj(), *held).conj() if g.dtype.kind == "c" else derivative(g, *held)


def _sum(a: Block, b: Block, into: bool) -> Block:
    if into and a.ndim and getattr(a.flags, "writeable", True):  # CuPy's arrays always are
        add_to(a, b)
        return a
    return namespace(a).asarray(a + b)


class Underway(NamedTuple):
    """A term that moves, its layout when it has, and its bytes at most on any rank."""

    walk: Walk
    node: Node
    move: Move
    layout: Layout
    nbytes: int


class GradientScatter:
    """The terms of weights' gradients that are in flight to where the weights rest, of a walk and those within it."""

    def __init__(self) -> None:
        self.queue: deque[Underway] = deque()
        self.nbytes = 0
        self.gatherers: dict[int, Gatherer] = {}
        """The gatherers of the parameters whose terms were taken."""

    def takes(self, walk: Walk, node: Node, term: Term, owned: bool) -> bool:
        """Take a term that has to move, of a parameter with a weight gatherer; the walk is given it afterwards."""
        owner = node.owner() if node.owner is not None else None
        gatherer = None if owner is None else owner.storage.gatherer
        if gatherer is None or not node.grid.inside:
            return False
        (block, layout), grid = term, node.grid
        have, rest = grid.effective(layout), grid.effective(node.layout)
        goal = rest.with_partial(tuple(a for a in have.partial if a not in rest.cut_axes))
        if have == goal:
            return False
        if gatherer.whole:
            kept = gatherer.kept
            if not walk.sync:  # a later pass moves the sum
                kept.setdefault(node.age, (node, node.accumulator()))[1].add(term, owned=owned)
                walk.count(node)
                return True
            if node.age in kept:
                block, have, owned = _with(kept.pop(node.age)[1], (block, have), owned)
        if block.dtype != node.dtype:
            block, owned = cast(block, node.dtype), True
        self.gatherers[id(gatherer)] = gatherer
        nbytes = most_bytes(have, node.shape, grid.sizes, block.itemsize)
        self.land(max(0, gatherer.limit - nbytes))
        group = gatherer.scatters
        waiting = len(group)
        move = start(block, have, goal, node.shape, grid, owned=owned, group=group)
        self.queue.append(Underway(walk, node, move, goal, nbytes))
        self.nbytes += nbytes
        if len(group) > waiting:
            group.nbytes += nbytes
        if 2 * group.nbytes >= gatherer.limit:  # the other half may be in flight
            group.start()
        return True

    def formed(self, walk: Walk, node: Node, term: Term | None) -> Term | None:
        """Return a term as a block; None for a parameter's whole gradient that the reducer has formed in its place."""
        if term is None or not isinstance(term[0], DeferredGemm):
            return term
        owner = node.owner() if node.owner is not None else None
        if owner is not None and owner.reducer is not None and owner.storage.gatherer is None:
            completing, whole = walk.completing(node), node.accumulator().unmoved(term)
            if completing is not None and whole is not None:
                owner.reducer.ready(owner, *whole, sync=completing.sync)
                return None
        return term[0].formed(), term[1]

    def finish(self, walk: Walk) -> None:
        """Await all; of passes within `no_sync` also what was kept whole of parameters that this walk did not reach."""
        self.land()
        for gatherer in self.gatherers.values():
            left = list(gatherer.kept.values())
            gatherer.kept.clear()
            for node, sums in left:
                walk.complete(node, sums)

    def land(self, most: int = 0) -> None:
        """Await the oldest terms, until at most so many bytes are in flight."""
        while self.queue and self.nbytes > most:
            walk, node, move, layout, nbytes = self.queue.popleft()
            self.nbytes -= nbytes
            walk.landed(node, (move.wait(), layout))

    def poll(self) -> None:
        """Progress pending communication: MPI progresses only within its calls."""
        if self.queue:
            self.queue[0].move.test()


def _with(sums: GradientAccumulator, term: Term, owned: bool) -> tuple[Block, Layout, bool]:
    """Return a term and those before it as one."""
    sums.add(term, owned=owned)
    if len(sums.terms) > 1:  # they differ in their layouts
        return *sums.summed(), True
    ((layout, block),) = sums.terms.items()
    return block, layout, sums.mine[layout]


def most_bytes(layout: Layout, shape: tuple[int, ...], sizes: Any, itemsize: int) -> int:
    """Return the bytes of the largest rank's block: the same number on all ranks."""
    pieces = (-(-n // span_of(cut, sizes)) for n, cut in zip(shape, layout.dims, strict=True))
    return math.prod(pieces) * itemsize
