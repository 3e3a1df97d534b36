"""Terms of parameters' gradients on their way home, while the walk goes on.

A weight that rests cut along axes that replicate it at work (ZeRO-3) has its gradient reduce-scattered over them.  The
walk starts that as soon as the term is there, and takes it in later: at points that depend on global shapes alone, so
that all ranks communicate in one order.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from parlinalg.autograd.arrivals import Arrivals, Term
from parlinalg.autograd.unformed import Unformed
from parlinalg.layout import Layout, span_of
from parlinalg.redistribute import Move, start

if TYPE_CHECKING:
    from parlinalg.autograd.tape import Fetcher, Node, Walk

Block = Any


class Underway(NamedTuple):
    """A term that moves, its layout when it has, and its bytes at most on any rank."""

    walk: Walk
    node: Node
    move: Move
    layout: Layout
    nbytes: int


class Homeward:
    """The queue of a walk's terms on their way, and the walks' within it."""

    def __init__(self) -> None:
        self.queue: deque[Underway] = deque()
        self.nbytes = 0
        self.fetchers: dict[int, Fetcher] = {}
        """Those of the parameters whose terms were taken."""

    def takes(self, walk: Walk, node: Node, term: Term, owned: bool) -> bool:
        """Take a term, if it is of a parameter with a fetcher and has to move; the walk is given it when it has."""
        owner = node.owner() if node.owner is not None else None
        if owner is None or owner.fetcher is None or not node.grid.inside:
            return False
        (block, layout), grid = term, node.grid
        have, rest = grid.effective(layout), grid.effective(node.layout)
        goal = rest.with_partial(tuple(a for a in have.partial if a not in rest.cut_axes))
        if have == goal:
            return False
        if owner.fetcher.whole:
            kept = owner.fetcher.kept
            if not walk.sync:  # a later pass moves the sum
                kept.setdefault(node.age, (node, node.arrivals()))[1].add(term, owned=owned)
                walk.count(node)
                return True
            if node.age in kept:
                block, have, owned = _with(kept.pop(node.age)[1], (block, have), owned)
        if block.dtype != node.dtype:
            block, owned = block.astype(node.dtype), True
        self.fetchers[id(owner.fetcher)] = owner.fetcher
        nbytes = most_bytes(have, node.shape, grid.sizes, block.itemsize)
        self.land(max(0, owner.fetcher.limit - nbytes))
        move = start(block, have, goal, node.shape, grid, owned=owned)
        self.queue.append(Underway(walk, node, move, goal, nbytes))
        self.nbytes += nbytes
        return True

    def formed(self, walk: Walk, node: Node, term: Term | None) -> Term | None:
        """A term as a block; None if it is a parameter's whole gradient, and the reducer has formed it in its place."""
        if term is None or not isinstance(term[0], Unformed):
            return term
        owner = node.owner() if node.owner is not None else None
        if owner is not None and owner.reducer is not None and owner.fetcher is None:
            completing, whole = walk.completing(node), node.arrivals().unmoved(term)
            if completing is not None and whole is not None:
                owner.reducer.ready(owner, *whole, sync=completing.sync)
                return None
        return term[0].formed(), term[1]

    def finish(self, walk: Walk) -> None:
        """Await all; of passes within `no_sync` also what was kept whole of parameters that this walk did not reach."""
        self.land()
        for fetcher in self.fetchers.values():
            left = list(fetcher.kept.values())
            fetcher.kept.clear()
            for node, sums in left:
                walk.complete(node, sums)

    def land(self, most: int = 0) -> None:
        """Await the oldest terms, until at most so many bytes are under way."""
        while self.queue and self.nbytes > most:
            walk, node, move, layout, nbytes = self.queue.popleft()
            self.nbytes -= nbytes
            walk.landed(node, (move.wait(), layout))

    def poll(self) -> None:
        """Drive the communication on: MPI progresses only within its calls."""
        if self.queue:
            self.queue[0].move.test()


def _with(sums: Arrivals, term: Term, owned: bool) -> tuple[Block, Layout, bool]:
    """A term and those before it as one."""
    sums.add(term, owned=owned)
    if len(sums.terms) > 1:  # they differ in their layouts
        return *sums.summed(), True
    ((layout, block),) = sums.terms.items()
    return block, layout, sums.mine[layout]


def most_bytes(layout: Layout, shape: tuple[int, ...], sizes: Any, itemsize: int) -> int:
    """Bytes of the largest rank's block: the same number on all ranks."""
    pieces = (-(-n // span_of(cut, sizes)) for n, cut in zip(shape, layout.dims, strict=True))
    return math.prod(pieces) * itemsize
