"""Plans of products: which axes of a grid cut which dims of `y[b, m, n] = x[b, m, k] w[b, k, n]`.  Pure data.

Each axis of the processor grid cuts at most one of b, m, n, k at work.  The one matrix that lacks the cut dim moves
along that axis: gathered if it is an input, reduced if it is the output.  Where that matrix rests between products
decides the scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from parlinalg.errors import PlanError
from parlinalg.layout import AxisSpec, Cut, Layout, as_cut
from parlinalg.moves import words

Shape = tuple[int, ...]


def _cuts(group: Iterable[AxisSpec]) -> tuple[Cut, ...]:
    return tuple(as_cut(c) for c in group)


@dataclass(frozen=True)
class Plan:
    """A product `y[b, m, n] = sum over k of x[b, m, k] w[b, k, n]`, where each of b, m, n, k is a group of dims.

    Parameters
    ----------
    m, n, k : tuple of (None, str or tuple of str)
        One entry for each dim of the group: the axes that cut it **at work**.
    x, w, y : Layout
        The layouts of `x[*b, *m, *k]`, `w[*b, *k, *n]` and `y[*b, *m, *n]` **at rest**.
    b : tuple, optional
        Dims that x and w share and the product does not mix.

    Raises
    ------
    PlanError
        If an axis cuts two of the dims at work, or a layout has the wrong number of dims.
    """

    m: tuple[Cut, ...]
    n: tuple[Cut, ...]
    k: tuple[Cut, ...]
    x: Layout
    w: Layout
    y: Layout
    b: tuple[Cut, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in "mnkb":
            object.__setattr__(self, name, _cuts(getattr(self, name)))
        seen: dict[str, str] = {}
        for name in "bmnk":
            for axis in chain(*getattr(self, name)):
                if axis in seen:
                    raise PlanError(
                        f"axis {axis!r} cuts both {seen[axis]} and {name} at work; an axis cuts at most one of b, m, "
                        "n, k, once"
                    )
                seen[axis] = name
        for name, groups in (("x", "bmk"), ("w", "bkn"), ("y", "bmn")):
            layout: Layout = getattr(self, name)
            dims = sum(len(getattr(self, g)) for g in groups)
            if layout.ndim != dims:
                raise PlanError(
                    f"{name} = {layout!r} has {layout.ndim} dims, but this plan's {name}[{', '.join(groups)}] has "
                    f"{dims}"
                )
        for name in ("x", "w"):
            if getattr(self, name).partial:
                raise PlanError(f"{name} = {getattr(self, name)!r} rests unsummed; a product takes summed operands")
        if stray := set(self.y.partial) - set(chain(*self.k)):
            raise PlanError(
                f"y = {self.y!r} is partial over {sorted(stray)}, which do not cut k at work: only a sum over k leaves "
                "terms"
            )

    @cached_property
    def x_work(self) -> Layout:
        """x at work: everything the local product needs."""
        work = Layout(*self.b, *self.m, *self.k)
        return self.x if self.x == work else work

    @cached_property
    def w_work(self) -> Layout:
        """w at work."""
        work = Layout(*self.b, *self.k, *self.n)
        return self.w if self.w == work else work

    @cached_property
    def y_work(self) -> Layout:
        """y at work: its terms are not summed over the axes that cut k."""
        work = Layout(*self.b, *self.m, *self.n, partial=tuple(chain(*self.k)))
        return self.y if self.y == work else work

    @cached_property
    def grad_x(self) -> Plan:
        """The plan of `dx = dy wᵀ`: n and k exchange roles, and so do x and y.

        Its x is the gradient of y, which rests as y, and summed; its w is wᵀ, `w[*b, *n, *k]`.
        """
        w = self.w.permuted(self.w_transpose)
        return Plan(m=self.m, n=self.k, k=self.n, x=self.y.with_partial(()), w=w, y=self.x, b=self.b)

    @cached_property
    def grad_w(self) -> Plan:
        """The plan of `dw = xᵀ dy`: a product over m.

        Its x is xᵀ, `x[*b, *k, *m]`; its w is the gradient of y, which rests as y, and summed.
        """
        x = self.x.permuted(self.x_transpose)
        return Plan(m=self.k, n=self.n, k=self.m, x=x, w=self.y.with_partial(()), y=self.w, b=self.b)

    @cached_property
    def x_transpose(self) -> tuple[int, ...]:
        """The order of the dims of x in xᵀ, `x[*b, *k, *m]`."""
        return _exchanged(self.x.ndim, len(self.b), len(self.m))

    @cached_property
    def w_transpose(self) -> tuple[int, ...]:
        """The order of the dims of w in wᵀ, `w[*b, *n, *k]`."""
        return _exchanged(self.w.ndim, len(self.b), len(self.k))

    @cached_property
    def unsummed(self) -> Plan:
        """The same product, whose y stays as it is at work: nothing of it moves, and no term is summed."""
        return self if self.y is self.y_work else replace(self, y=self.y_work)

    @cached_property
    def scattered(self) -> Plan:
        """The same product, whose y is cut as it rests, and not summed over axes that do not cut it there."""
        partial = tuple(a for a in self.y_work.partial if a not in self.y.cut_axes)
        return replace(self, y=self.y.with_partial(partial))

    def result_shape(self, x: Shape, w: Shape) -> Shape:
        """Return the global shape of y for x and w of these shapes; raise a ValueError if b or k differ in them."""
        nb, nm, nk = len(self.b), len(self.m), len(self.k)
        if len(x) != nb + nm + nk or len(w) != nb + nk + len(self.n):
            raise ValueError(
                f"a product of shapes {x} and {w} does not fit a plan of {nb} batch dims, {nm} m, {nk} k and "
                f"{len(self.n)} n"
            )
        if x[:nb] != w[:nb] or x[nb + nm :] != w[nb : nb + nk]:
            raise ValueError(
                f"shapes {x} and {w} do not multiply: batch dims {x[:nb]} and {w[:nb]}, contracted dims "
                f"{x[nb + nm :]} and {w[nb : nb + nk]}"
            )
        return (*x[: nb + nm], *w[nb + nk :])

    def renamed(self, names: Mapping[str, str]) -> Plan:
        """Return the same plan with axes renamed; `{"c": "d", "d": "c"}` exchanges two."""

        def cuts(group: tuple[Cut, ...]) -> tuple[Cut, ...]:
            return tuple(tuple(names.get(a, a) for a in cut) for cut in group)

        return Plan(
            m=cuts(self.m), n=cuts(self.n), k=cuts(self.k), b=cuts(self.b),
            x=self.x.renamed(names), w=self.w.renamed(names), y=self.y.renamed(names),
        )  # fmt: skip

    def transposed(self) -> Plan:
        """Return the plan of `yᵀ = wᵀ xᵀ`, for plans whose groups have one dim each."""
        return Plan(m=self.n, n=self.m, k=self.k, b=self.b, x=_swap(self.w), w=_swap(self.x), y=_swap(self.y))

    def words(self, x: Shape, w: Shape, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
        """Return how many elements the rank at `coords` receives in the product of arrays of these shapes, exactly."""
        y = self.result_shape(x, w)
        return (
            words(self.x, self.x_work, x, sizes, coords)
            + words(self.w, self.w_work, w, sizes, coords)
            + words(self.y_work, self.y, y, sizes, coords)
        )


def _exchanged(ndim: int, batch: int, first: int) -> tuple[int, ...]:
    """Return the order of dims in which the two groups after the batch dims, the first of so many dims, are swapped."""
    middle = batch + first
    return (*range(batch), *range(middle, ndim), *range(batch, middle))


def _swap(layout: Layout) -> Layout:
    order = (*range(layout.ndim - 2), layout.ndim - 1, layout.ndim - 2)
    return layout.permuted(order)
