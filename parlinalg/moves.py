"""Changes of layout as communication: a pure plan of steps, and the words that each rank receives.

`moves` finds the steps; `parlinalg.redistribute` carries them out.  A rank never receives more words than its target
block lacks; sums count as reduce-scatter (n - own) and all-reduce (2 (n - own)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from parlinalg.errors import LayoutError
from parlinalg.layout import Cut, Layout, index_of, piece, span_of

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Step:
    """One step from layout `src` to layout `dst`, over the ranks along `axes`.

    op : "mask" (keep the value where `axes` are all at coordinate 0, zeros elsewhere), "embed" (a block into zeros of
        the size of its dim), "slice", "reduce_scatter", "all_reduce", "all_gather", "all_to_all" (from `dim` to
        `to_dim`) or "exchange" (intersecting rectangles)
    """

    op: str
    axes: Cut
    src: Layout
    dst: Layout
    dim: int = -1
    to_dim: int = -1

    def words(self, shape: tuple[int, ...], sizes: Sizes, coords: Mapping[str, int]) -> int:
        """Return the elements that the rank at `coords` receives in this step."""
        if self.op in ("mask", "embed", "slice"):
            return 0
        before = self.src.block(shape, sizes, coords)
        after = self.dst.block(shape, sizes, coords)
        if self.op == "reduce_scatter":
            return _volume(before) - _volume(after)
        if self.op == "all_reduce":
            n = _volume(before)
            return 2 * (n - len(piece(n, span_of(self.axes, sizes), index_of(self.axes, sizes, coords))))
        return _volume(after) - _overlap(before, after)


def _volume(block: tuple[range, ...]) -> int:
    return math.prod(len(r) for r in block)


def _overlap(a: tuple[range, ...], b: tuple[range, ...]) -> int:
    return math.prod(max(0, min(r.stop, s.stop) - max(r.start, s.start)) for r, s in zip(a, b, strict=True))


def moves(src: Layout, dst: Layout, sizes: Sizes) -> tuple[Step, ...]:
    """Return the steps that turn layout `src` into `dst` on a grid with these axes, in the order all ranks take them.

    Axes of one rank cut nothing and are left out: the steps' layouts do not name them.
    """
    if src.ndim != dst.ndim:
        raise LayoutError(f"cannot redistribute {src!r} to {dst!r}: one has {src.ndim} dims, the other {dst.ndim}")
    return _moves(src, dst, tuple(sizes.items()))


@lru_cache(maxsize=4096)
def _moves(src: Layout, dst: Layout, items: tuple[tuple[str, int], ...]) -> tuple[Step, ...]:
    ones = [a for a, n in items if n == 1]
    walk = _Walk(src.without(ones), dst.without(ones), {a: i for i, (a, _) in enumerate(items)})
    walk.make_partial()
    walk.slice_and_sum()
    walk.rearrange()
    return tuple(walk.steps)


class _Walk:
    """The state while steps are found: where we are, where we go, and the steps so far."""

    def __init__(self, now: Layout, goal: Layout, order: Mapping[str, int]) -> None:
        self.now, self.goal, self.order = now, goal, order
        self.steps: list[Step] = []

    def take(self, op: str, axes: Cut, then: Layout, dim: int = -1, to_dim: int = -1) -> None:
        self.steps.append(Step(op, axes, self.now, then, dim, to_dim))
        self.now = then

    def sorted(self, axes: set[str]) -> Cut:
        return tuple(sorted(axes, key=self.order.__getitem__))

    def make_partial(self) -> None:
        """Make axes partial: a whole value stays at coordinate 0, a block goes into zeros where it stands."""
        for axis in self.sorted(set(self.goal.partial) - set(self.now.partial)):
            dim = self.now.where(axis)
            partial = (*self.now.partial, axis)
            if dim is not None and self.now.dims[dim][-1] == axis:
                self.take("embed", (axis,), self.now.with_dim(dim, self.now.dims[dim][:-1]).with_partial(partial), dim)
                continue
            if dim is not None:
                self.exchange(self.now.without([axis]))
            self.take("mask", (axis,), self.now.with_partial(partial))

    def slice_and_sum(self) -> None:
        """Free cuts first, since they shrink the sums; then sums, scattered where the goal cuts by their axis."""
        while self.slice_next() or self.scatter_next():
            pass
        pending = set(self.now.partial) - set(self.goal.partial)
        for dim, cut in enumerate(
            self.goal.dims
        ):  # a cut of the goal that stands behind one not made yet: scatter here, exchange later
            if axes := tuple(a for a in cut if a in pending):
                self.scatter(dim, axes)
                pending -= set(axes)
        if pending:
            kept = [a for a in self.now.partial if a not in pending]
            self.take("all_reduce", self.sorted(pending), self.now.with_partial(kept))
            while self.slice_next():
                pass

    def next_axes(self, dim: int) -> Cut:
        """Return the axes by which the goal cuts a dim further, where the cuts so far are a prefix of the goal's."""
        have, want = self.now.dims[dim], self.goal.dims[dim]
        return want[len(have) :] if want[: len(have)] == have else ()

    def slice_next(self) -> bool:
        for dim in range(self.now.ndim):
            free: Cut = ()
            for axis in self.next_axes(dim):
                if axis in self.now.axes:
                    break
                free += (axis,)
            if free:
                self.take("slice", free, self.now.with_dim(dim, self.now.dims[dim] + free), dim)
                return True
        return False

    def scatter_next(self) -> bool:
        for dim in range(self.now.ndim):
            summed: Cut = ()
            for axis in self.next_axes(dim):
                if axis not in self.now.partial:
                    break
                summed += (axis,)
            if summed:
                self.scatter(dim, summed)
                return True
        return False

    def scatter(self, dim: int, axes: Cut) -> None:
        kept = [a for a in self.now.partial if a not in axes]
        self.take("reduce_scatter", axes, self.now.with_partial(kept).with_dim(dim, self.now.dims[dim] + axes), dim)

    def rearrange(self) -> None:
        """Only the cuts differ now: gathers, one all-to-all, or the exchange of rectangles."""
        have, want = self.now.dims, self.goal.dims
        if have == want:
            return
        common = [
            next((i for i, (a, b) in enumerate(zip(h, w, strict=False)) if a != b), min(len(h), len(w)))
            for h, w in zip(have, want, strict=True)
        ]
        removed = [h[c:] for h, c in zip(have, common, strict=True)]
        added = [w[c:] for w, c in zip(want, common, strict=True)]
        gains = [d for d, cut in enumerate(added) if cut]
        if any(r and a for r, a in zip(removed, added, strict=True)) or len(gains) > 1:
            return self.exchange(self.goal)
        if gains:
            to_dim, axes = gains[0], added[gains[0]]
            dim = self.now.where(axes[0])
            if dim is None or removed[dim][-len(axes) :] != axes:
                return self.exchange(self.goal)
            kept = have[dim][: -len(axes)]
            self.take(
                "all_to_all", axes, self.now.with_dim(dim, kept).with_dim(to_dim, have[to_dim] + axes), dim, to_dim
            )
        for dim, cut in enumerate(self.goal.dims):
            if axes := self.now.dims[dim][len(cut) :]:
                self.take("all_gather", axes, self.now.with_dim(dim, cut), dim)

    def exchange(self, goal: Layout) -> None:
        """Rectangles of source and target meet; a rank's senders differ from it only along axes that cut the source."""
        target = goal.with_partial(self.now.partial)
        changed = {a for h, w in zip(self.now.dims, target.dims, strict=True) if h != w for a in h}
        self.take("exchange", self.sorted(changed), target)


def words(src: Layout, dst: Layout, shape: tuple[int, ...], sizes: Sizes, coords: Mapping[str, int]) -> int:
    """Return how many elements the rank at `coords` receives when an array goes from layout `src` to `dst`."""
    return sum(step.words(shape, sizes, coords) for step in moves(src, dst, sizes))
