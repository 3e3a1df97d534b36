"""Schemes: the layout of a model's residual stream, and the plans into and out of a block.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from parlinalg.errors import PlanError
from parlinalg.layout import AxisSpec, Cut, Layout, as_cut
from parlinalg.plan import Plan


def table(
    m: tuple[AxisSpec, AxisSpec], n: AxisSpec, k: AxisSpec, x: Layout, w: Layout, y: Layout
) -> Plan:  # fmt: skip
    """Return the plan of a product of x[batch, sequence, k] and w[k, n]: the cuts at work and the layouts at rest."""
    return Plan(m=tuple(as_cut(c) for c in m), n=(as_cut(n),), k=(as_cut(k),), x=x, w=w, y=y)


@dataclass(frozen=True)
class Scheme:
    """A parallel scheme: two tables from which every layer follows.

    Attributes
    ----------
    name : str
    axes : tuple of str
        The grid's axes, outermost first.
    expand : Plan
        Of products into a block: from the residual stream [batch, sequence, hidden] to its inside.
    contract : Plan
        Of products out of a block: from its inside back to the residual stream.
    ulysses : tuple of str
        The axes that cut the sequence inside of a block and whose cut attention exchanges for a cut of the heads
        (Jacobs et al., DeepSpeed-Ulysses, 2023).  Over the others its keys and values go round a ring.

    A scheme as its file defines it has two leading dims, batch and sequence, and one dim in each of k and n.  `leading`
    and `wide` adapt it to other numbers of dims.
    """

    name: str
    axes: Cut
    expand: Plan
    contract: Plan
    ulysses: Cut = ()

    def __post_init__(self) -> None:
        for what, here, there in (
            ("the layout between the products", self.expand.y, self.contract.x),
            ("the residual stream's layout", self.contract.y, self.expand.x),
        ):
            if here != there:
                raise PlanError(
                    f"scheme {self.name!r}: {what} is {here!r} as written and {there!r} as read; they must agree"
                )
        named = {a for p in (self.expand, self.contract) for q in (p.x, p.w, p.y, p.x_work, p.w_work) for a in q.axes}
        if not named <= set(self.axes):
            raise PlanError(f"scheme {self.name!r} has the axes {self.axes}, but its plans name {sorted(named)}")

    @property
    def residual(self) -> Layout:
        """The layout of the residual stream, [batch, sequence, hidden]."""
        return self.expand.x

    @property
    def inner(self) -> Layout:
        """The layout between the two products, [batch, sequence, inner]."""
        return self.expand.y

    @property
    def tokens(self) -> Layout:
        """The layout of what has no features, such as ids and labels: [batch, sequence]."""
        return Layout(*self.expand.x.dims[: len(self.expand.m)])

    def leading(self, dims: int) -> Scheme:
        """Return the scheme for arrays with `dims` leading dims, of a scheme with two.

        With one, [tokens, features], tokens are cut by the axes of batch and sequence; dims after the second are
        whole; with none, a single vector, these axes repeat the work.
        """
        return replace(self, expand=adapted(self.expand, dims), contract=adapted(self.contract, dims))

    def for_dims(self, ndim: int) -> Scheme:
        """Return the scheme for arrays of `ndim` dims, the last of which are features."""
        return self.leading(ndim - 1)

    def wide(self, outer: int, inner: int) -> Scheme:
        """Return the scheme for a block with `outer` dims of features in the residual stream and `inner` inside.

        A group of dims is cut on its first one: attention's [batch, sequence, heads, head_dim] on its heads.
        """
        dims = len(self.expand.m)
        return replace(
            self,
            expand=adapted(self.expand, dims, k=outer, n=inner),
            contract=adapted(self.contract, dims, k=inner, n=outer),
        )

    def plan(self, kind: str, *, leading: int = 2, k: int = 1, n: int = 1) -> Plan:
        """Return the plan of one product, "expand" or "contract", with so many dims leading, contracted and put out."""
        if kind not in ("expand", "contract"):
            raise PlanError(f"a scheme has the plans 'expand' and 'contract', not {kind!r}")
        return adapted(self.expand if kind == "expand" else self.contract, leading, k=k, n=n)

    def convolution(self, kind: str) -> Plan:
        """Return the plan of a convolution of images [batch, height, width, channels], "expand" or "contract".

        It is that of a product of patches [batch, height, width, kernel height, kernel width, channels] and weights
        [kernel height, kernel width, channels, features].  The axes of batch and sequence cut the batch; height, width
        and the kernel's dims are whole.
        """
        plan = self.plan(kind, leading=1)
        (batch,), none = plan.m, ((), ())
        return Plan(
            m=(batch, *none), n=plan.n, k=(*none, *plan.k),
            x=Layout(plan.x.dims[0], *none, *none, plan.x.dims[1]), w=Layout(*none, *plan.w.dims),
            y=Layout(plan.y.dims[0], *none, plan.y.dims[1], partial=plan.y.partial),
        )  # fmt: skip

    def images(self, kind: str) -> Layout:
        """Return the layout of images [batch, height, width, channels] that a product of a kind gives.

        The residual stream's is that of "contract", the inside of a block's that of "expand".
        """
        return self.convolution(kind).y

    def with_data(self, axis: str) -> Scheme:
        """Return the scheme with a further axis, outermost, that cuts the batch everywhere: data parallel around it."""
        return self._cut_also(axis, 0)

    def with_sequence(self, axis: str, *, ulysses: bool = False) -> Scheme:
        """Return the scheme with a further, outermost axis that cuts the sequence everywhere.

        Parameters
        ----------
        axis : str
        ulysses : bool
            True if attention exchanges this cut for one of its heads; if not, keys and values go round a ring.  Where
            there is both, Ulysses is inside: `scheme.with_sequence("u", ulysses=True).with_sequence("s")`.
        """
        if not ulysses and self.ring:
            raise PlanError(f"scheme {self.name!r} has a ring over {self.ring[0]!r}; {axis!r} cannot be a second one")
        if ulysses and self.ring:
            raise PlanError(
                f"scheme {self.name!r} has a ring over {self.ring[0]!r}: add the axis of Ulysses, {axis!r}, before it"
            )
        found = self._cut_also(axis, 1)
        return replace(found, ulysses=(axis, *self.ulysses)) if ulysses else found

    @property
    def ring(self) -> Cut:
        """The axis of ring attention, if there is one: it cuts the sequence, and is not one of `ulysses`."""
        return tuple(a for a in self.inner.dims[1] if a not in self.ulysses) if len(self.expand.m) > 1 else ()

    def with_weights_cut(self, axes: AxisSpec) -> Scheme:
        """Return the scheme with weights that rest cut by some of its axes too (ZeRO-3, over the data axes).

        The axes cut the first dim of each weight innermost; they must be some that replicate the weights.
        """
        more = as_cut(axes)

        def cut(plan: Plan) -> Plan:
            return replace(plan, w=plan.w.with_dim(len(plan.b), (*plan.w.dims[len(plan.b)], *more)))

        name = f"{self.name} with weights cut over {' and '.join(more)}"
        return replace(self, name=name, expand=cut(self.expand), contract=cut(self.contract))

    def factored(self, axis: str, into: tuple[str, ...]) -> Scheme:
        """Return the scheme with one of its axes taken as several, outermost first, whose sizes multiply to its own.

        Attention with fewer heads of keys than ranks cuts them by the outer ones, and the queries that share them by
        the inner ones.
        """
        if axis not in self.axes or len(set(into)) != len(into) or not into or set(into) & (set(self.axes) - {axis}):
            raise PlanError(
                f"scheme {self.name!r} has the axes {self.axes}: one of them is taken as several with new names, not "
                f"{axis!r} as {into}"
            )
        axes = tuple(chain(*(into if a == axis else (a,) for a in self.axes)))
        expand, contract = (_factored(p, axis, into) for p in (self.expand, self.contract))
        ulysses = tuple(chain(*(into if a == axis else (a,) for a in self.ulysses)))
        return replace(self, axes=axes, expand=expand, contract=contract, ulysses=ulysses)

    def _cut_also(self, axis: str, dim: int) -> Scheme:
        def cut(plan: Plan) -> Plan:
            def more(layout: Layout) -> Layout:
                return layout.with_dim(dim, (axis, *layout.dims[dim]))

            m = tuple((axis, *c) if d == dim else c for d, c in enumerate(plan.m))
            return replace(plan, m=m, x=more(plan.x), y=more(plan.y))

        if len(self.expand.m) < 2:
            raise PlanError(
                f"scheme {self.name!r} is already adapted to {len(self.expand.m)} leading dims; add {axis!r} first"
            )
        return replace(
            self, name=f"{axis} × {self.name}", axes=(axis, *self.axes), expand=cut(self.expand),
            contract=cut(self.contract),
        )  # fmt: skip


def _factored(plan: Plan, axis: str, into: Cut) -> Plan:
    def cuts(dims: tuple[Cut, ...]) -> tuple[Cut, ...]:
        return tuple(tuple(chain(*(into if a == axis else (a,) for a in cut))) for cut in dims)

    x, w, y = (Layout(*cuts(layout.dims), partial=cuts((layout.partial,))[0]) for layout in (plan.x, plan.w, plan.y))
    return Plan(m=cuts(plan.m), n=cuts(plan.n), k=cuts(plan.k), b=cuts(plan.b), x=x, w=w, y=y)


def spread_axes(plan: Plan, group: str, axes: Cut) -> Plan:
    """Return the plan with these axes cutting the second dim of a group, "n" or "k", where they cut its first one.

    Attention's queries [kv heads, g, head_dim] are cut so by axes that do not cut the heads of keys.
    """
    return _regrouped(plan, group, lambda first, second, *rest: (
        tuple(a for a in first if a not in axes), (*second, *(a for a in first if a in axes)), *rest,
    ))  # fmt: skip


def shared(plan: Plan, axes: Cut) -> Plan:
    """Return the plan with these axes not cutting n: all their ranks make, and hold, the same part of y."""
    return _regrouped(plan, "n", lambda *cuts: tuple(tuple(a for a in cut if a not in axes) for cut in cuts))


def _regrouped(plan: Plan, group: str, change: Callable[..., tuple[Cut, ...]]) -> Plan:
    """Return the plan with the cuts of the dims of n or k changed, at work and at rest."""

    def at(layout: Layout, first: int) -> Layout:
        cut = layout.dims
        return Layout(*cut[:first], *change(*cut[first : first + dims]), *cut[first + dims :], partial=layout.partial)

    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
    if group == "n":
        dims = len(plan.n)
        return replace(plan, n=change(*plan.n), w=at(plan.w, nb + nk), y=at(plan.y, nb + nm))
    dims = nk
    return replace(plan, k=change(*plan.k), w=at(plan.w, nb), x=at(plan.x, nb + nm))


def bias(plan: Plan) -> Layout:
    """Return the layout of a bias: that of the dims the product puts out, as y rests."""
    return Layout(*plan.y.dims[len(plan.b) + len(plan.m) :])


@lru_cache(maxsize=4096)
def adapted(plan: Plan, leading: int = 2, *, k: int = 1, n: int = 1) -> Plan:
    """Return a plan over [batch, sequence, k] and [k, n] for other numbers of leading dims, and of dims in k and n.

    Parameters
    ----------
    plan : Plan
        With two entries in m and one in n and k; others are returned as they are if they fit the numbers asked for.
    leading, k, n : int
        The number of dims in m, k and n.

    Raises
    ------
    PlanError
        If k or n is 0, or the plan is neither over batch and sequence nor as asked for.
    """
    have = (len(plan.m), len(plan.k), len(plan.n))
    if have == (leading, k, n):
        return plan
    if have != (2, 1, 1) or plan.b or leading < 0 or k < 1 or n < 1:
        raise PlanError(
            f"a plan with {have[0]} leading dims, {have[1]} contracted and {have[2]} put out cannot be adapted to "
            f"{leading}, {k} and {n}: adapt the scheme's own plan (2, 1 and 1) to at least 0, 1 and 1"
        )

    def lead(dims: tuple[Cut, ...]) -> tuple[Cut, ...]:
        if leading == 0:
            return ()
        if leading == 1:  # what cuts at work comes first, so that the way to work is a gather
            axes = [a for cut in dims for a in cut]
            return (tuple(sorted(axes, key=lambda a: a not in working)),)
        return (*dims, *((),) * (leading - 2))

    def group(cut: Cut, dims: int) -> tuple[Cut, ...]:
        return (cut, *((),) * (dims - 1))

    working = {a for cut in plan.m for a in cut}
    (*x_lead, x_k), (w_k, w_n), (*y_lead, y_n) = plan.x.dims, plan.w.dims, plan.y.dims
    return Plan(
        m=lead(plan.m),
        n=group(plan.n[0], n),
        k=group(plan.k[0], k),
        x=Layout(*lead(tuple(x_lead)), *group(x_k, k)),
        w=Layout(*group(w_k, k), *group(w_n, n)),
        y=Layout(*lead(tuple(y_lead)), *group(y_n, n), partial=plan.y.partial),
    )
