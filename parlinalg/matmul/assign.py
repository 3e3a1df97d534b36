"""Assignment of a grid's axes to the dims of a product, from the operands' layouts: used by `A @ B`.  Pure.

Each axis of more than one rank is tried on each of b, m, n and k, and on none (its ranks repeat the work).  Among the
assignments whose largest block product is within 10% of the least possible the chooser takes the one that moves the
fewest words, counting the way of x and w to work and of y to rest; then the fewest messages; then the first, in the
order b, m, n, k, none of the grid's axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import permutations, product
from operator import itemgetter

from parlinalg.errors import PlanError
from parlinalg.layout import Cut, Layout, span_of
from parlinalg.matmul.planner import MARGIN
from parlinalg.moves import moves
from parlinalg.plan import Plan, Shape

RANKS_SEEN = 16
NOWHERE = -1
Items = tuple[tuple[str, int], ...]
Choice = tuple[int, ...]
"""For each axis the place it cuts: an index into the dims of (*b, *m, n, k), or NOWHERE."""


def assign(
    x: Layout,
    w: Layout,
    x_shape: Shape,
    w_shape: Shape,
    sizes: Mapping[str, int] | Items,
    out: Layout | None = None,
    batch: int = 0,
) -> Plan:
    """Return the plan of `y[*b, *m, n] = x[*b, *m, k] w[*b, k, n]` for operands that rest as they do.

    Parameters
    ----------
    x, w : Layout
        The operands' layouts at rest, without partial axes.
    x_shape, w_shape : tuple of int
        Their global shapes; sizes of zero are allowed.
    sizes : dict of str to int, or its items
        The grid's axes, in its order.
    out : Layout, optional
        The layout of y at rest.  By default the axes that cut b, m or n at work go on cutting there, those that cut k
        are reduce-scattered onto the dim of m or n whose piece at work is longer (n if equally long), and those that
        cut none leave y replicated.
    batch : int
        The number of leading dims b that x and w share; the other leading dims of x are m.

    Returns
    -------
    Plan
        Words are those of the rank that receives the most; on grids of more than 16 ranks 16 of them, spread over the
        grid, stand for all.  Axes of one rank, which cut nothing, stay where the operands name them.

    Raises
    ------
    PlanError
        If the shapes do not multiply, or an operand is partial.
    LayoutError
        If a layout does not fit its shape or the grid.

    Examples
    --------
    >>> plan = assign(Layout("r", "c"), Layout("r", "c"), (64, 64), (64, 64), {"r": 2, "c": 2})
    >>> plan.m, plan.n, plan.k, plan.y
    ((('r',),), (('c',),), ((),), Layout('r', 'c'))
    """
    items = sizes if isinstance(sizes, tuple) else tuple(sizes.items())
    return _assign(x, w, x_shape, w_shape, items, out, batch)


@lru_cache(maxsize=4096)
def _assign(
    x: Layout, w: Layout, x_shape: Shape, w_shape: Shape, items: Items, out: Layout | None, batch: int
) -> Plan:  # fmt: skip
    return _Chooser(x, w, x_shape, w_shape, dict(items), out, batch).best()


class _Move:
    """One change of layout: its messages, and the words that a rank receives, counted when asked for."""

    def __init__(self, src: Layout, dst: Layout, shape: Shape, sizes: dict[str, int]) -> None:
        self.shape, self.sizes = shape, sizes
        self.steps = [s for s in moves(src, dst, sizes) if s.op not in ("mask", "embed", "slice")]
        self.messages = sum(span_of(s.axes, sizes) - 1 for s in self.steps)
        self._words: dict[int, int] = {}

    def words(self, rank: int, coords: Mapping[str, int]) -> int:
        if (found := self._words.get(rank)) is None:
            found = self._words[rank] = sum(s.words(self.shape, self.sizes, coords) for s in self.steps)
        return found


class _Chooser:
    """One product; its dims are numbered as in (*b, *m, n, k)."""

    def __init__(
        self,
        x: Layout,
        w: Layout,
        x_shape: Shape,
        w_shape: Shape,
        sizes: dict[str, int],
        out: Layout | None,
        batch: int,
    ) -> None:
        ones = {a for a, n in sizes.items() if n == 1}  # a sum over one rank is a sum already
        x, w = (o.with_partial(a for a in o.partial if a not in ones) for o in (x, w))
        self.x, self.w, self.out, self.sizes, self.nb = x, w, out, sizes, batch
        self.x_shape, self.w_shape = x_shape, w_shape
        if len(x_shape) <= batch or len(w_shape) != batch + 2:
            raise PlanError(
                f"x of shape {x_shape} and w of shape {w_shape} cannot be multiplied with {batch} shared leading dims: "
                f"x is [*b, *m, k] and w is [*b, k, n]"
            )
        if x_shape[-1] != w_shape[-2] or x_shape[:batch] != w_shape[:batch]:
            raise PlanError(
                f"x of shape {x_shape} and w of shape {w_shape} do not multiply: the last dim of x must be as long as "
                f"the last but one of w, and the {batch} shared leading dims equal"
            )
        self.y_shape = (*x_shape[:-1], w_shape[-1])
        self.n, self.k = len(x_shape) - 1, len(x_shape)
        self.extents = (*self.y_shape, x_shape[-1])
        for name, layout, shape in (("x", x, x_shape), ("w", w, w_shape), ("y", out, self.y_shape)):
            if layout is not None:
                layout.check(shape, sizes)
                if layout.partial and name != "y":
                    summed = layout.with_partial(())
                    raise PlanError(f"{name} = {layout!r} rests unsummed: redistribute it to {summed!r} first")
        self.axes = tuple(sizes)
        ranks = math.prod(sizes.values())
        self.seen = [(r, self._coords(r)) for r in _spread(ranks)]
        self._known: dict[tuple[Layout, Layout, Shape], _Move] = {}

    def best(self) -> Plan:
        choices = [(c, self._block(c)) for c in product(*(self._places(a) for a in self.axes))]
        allowed = MARGIN * min(block for _, block in choices)
        plans = [p for choice, block in choices if block <= allowed for p in self._plans(choice)]
        if len(plans) == 1:
            return plans[0]
        parts = [self._moves(p) for p in plans]
        rank, at = self.seen[len(self.seen) // 2]  # what one rank receives is a lower bound of the most
        bounds = [sum(m.words(rank, at) for m in part) for part in parts]
        best, figures = plans[0], (math.inf, math.inf, 0)
        for i in sorted(range(len(plans)), key=bounds.__getitem__):
            if bounds[i] > figures[0]:
                break
            most = max(sum(m.words(rank, at) for m in parts[i]) for rank, at in self.seen)
            best, figures = min(
                (best, figures), (plans[i], (most, sum(m.messages for m in parts[i]), i)), key=itemgetter(1)
            )
        return best

    def _places(self, axis: str) -> list[int]:
        """Return the dims an axis may cut, preferred first; for an axis of one rank, only those an operand names."""
        if self.out is not None and axis in self.out.partial:
            return [self.k]
        named = self._named(axis)
        if self.sizes[axis] == 1:
            return [min(named, default=NOWHERE)]
        tried = {d for d in named if d < self.n}
        for group in (range(self.nb), range(self.nb, self.n)):
            tried |= {max(group, key=lambda d: (self.extents[d], -d))} if group else set()
        return [*sorted(tried), self.n, self.k, NOWHERE]

    def _named(self, axis: str) -> set[int]:
        """Return the dims that some layout at rest cuts by this axis."""
        places: set[int] = set()
        for layout, dims in ((self.x, self._x_dims), (self.w, self._w_dims), (self.out, self._y_dims)):
            if layout is not None and (d := layout.where(axis)) is not None:
                places.add(dims[d])
        return places

    @property
    def _x_dims(self) -> tuple[int, ...]:
        return (*range(self.n), self.k)

    @property
    def _w_dims(self) -> tuple[int, ...]:
        return (*range(self.nb), self.k, self.n)

    @property
    def _y_dims(self) -> tuple[int, ...]:
        return tuple(range(self.n + 1))

    def _block(self, choice: Choice) -> int:
        """Return the largest block product: the first piece of every dim is its longest."""
        parts = [1] * len(self.extents)
        for axis, place in zip(self.axes, choice, strict=True):
            if place != NOWHERE:
                parts[place] *= self.sizes[axis]
        return math.prod(-(-n // p) for n, p in zip(self.extents, parts, strict=True))

    def _plans(self, choice: Choice) -> Iterator[Plan]:
        """Return the plans of a choice: where several axes cut a dim, in every order, the layouts' own ones first."""
        for cuts in product(*(self._orders(d, choice) for d in range(len(self.extents)))):
            b, m, n, k = cuts[: self.nb], cuts[self.nb : self.n], cuts[self.n], cuts[self.k]
            yield Plan(b=b, m=m, n=(n,), k=(k,), x=self.x, w=self.w, y=self.out or self._default(cuts))

    def _orders(self, dim: int, choice: Choice) -> list[Cut]:
        chosen = tuple(a for a, place in zip(self.axes, choice, strict=True) if place == dim)
        if len(chosen) < 2:
            return [chosen]
        own = [
            layout.dims[dims.index(dim)]
            for layout, dims in ((self.x, self._x_dims), (self.w, self._w_dims), (self.out, self._y_dims))
            if layout is not None and dim in dims
        ]
        orders = []
        for first in own:
            wanted = dict.fromkeys(a for cut in (first, *own, chosen) for a in cut)
            orders.append(tuple(a for a in wanted if a in chosen))
        return list(dict.fromkeys([*orders, *permutations(chosen)]))

    def _default(self, cuts: tuple[Cut, ...]) -> Layout:
        """Return y as it rests by default: cut as at work, and by the axes of k on the longer of m's and n's pieces."""
        longest = max(
            range(self.nb, self.n + 1), key=lambda d: (-(-self.extents[d] // span_of(cuts[d], self.sizes)), d)
        )
        dims = [(*cut, *cuts[self.k]) if d == longest else cut for d, cut in enumerate(cuts[: self.n + 1])]
        return Layout(*dims)

    def _moves(self, plan: Plan) -> list[_Move]:
        return [
            self._move(plan.x, plan.x_work, self.x_shape),
            self._move(plan.w, plan.w_work, self.w_shape),
            self._move(plan.y_work, plan.y, self.y_shape),
        ]

    def _move(self, src: Layout, dst: Layout, shape: Shape) -> _Move:
        if (found := self._known.get((src, dst, shape))) is None:
            found = self._known[src, dst, shape] = _Move(src, dst, shape, self.sizes)
        return found

    def _coords(self, rank: int) -> dict[str, int]:
        at = {}
        for axis in reversed(self.axes):
            rank, at[axis] = divmod(rank, self.sizes[axis])
        return at


def _spread(ranks: int) -> list[int]:
    """Return the ranks to look at: all, or the first, the last and others whose coordinates differ on every axis."""
    if ranks <= RANKS_SEEN:
        return list(range(ranks))
    stride = next(s for s in range(int(ranks * 0.618), 2 * ranks) if math.gcd(s, ranks) == 1)
    return [*(i * stride % ranks for i in range(RANKS_SEEN - 1)), ranks - 1]
