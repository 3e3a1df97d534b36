"""Plans of factorizations: their cost, and the reasons for the grid and the tiles.  Pure: nothing runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, SupportsIndex

import numpy as np

from parlinalg import tunables
from parlinalg.errors import PlanError
from parlinalg.grid import default_layout
from parlinalg.layout import Layout
from parlinalg.linalg import costs, tile_sizes
from parlinalg.linalg.costs import Costs
from parlinalg.linalg.footprint import HELD, footprint
from parlinalg.linalg.panels.pivoted import PANEL as PIVOTED
from parlinalg.linalg.reductions import bidiagonal
from parlinalg.linalg.tile_sizes import Constants, Time
from parlinalg.linalg.tiles import Deal, depths
from parlinalg.matmul.planner import whole_number
from parlinalg.units import ITEMSIZE, dtype_name, format_bytes, format_count, parse_bytes

ROUTINES = ("cholesky", "lu", "solve", "qr", "lstsq", "eigh", "svd")
SQUARE = ("cholesky", "solve", "eigh")
SOLUTIONS = ("solve", "lstsq")
"""Routines with right-hand sides."""
DTYPES = ("float32", "float64", "complex64", "complex128")
LONGER, SHORTER = 1 << 27, 1 << 23
"""Rows or columns of the largest matrix that is planned, on its longer and its shorter side: each is counted."""


class PlannedTime(Protocol):
    """The time of a plan on a machine, which `str` explains."""

    @property
    def seconds(self) -> float: ...


class Timing(Protocol):
    """Interface of a machine for plans, such as `parlinalg.planning.machine.Machine`."""

    @property
    def name(self) -> str: ...
    @property
    def gpus(self) -> bool: ...
    def ranks_on_node(self, ranks: int) -> int: ...
    def times_of(self, plans: Sequence[LinalgPlan]) -> Sequence[PlannedTime]: ...


@dataclass(frozen=True)
class LinalgPlan:
    """A grid and tiles for a factorization, as `plan_linalg` finds them.

    Attributes
    ----------
    routine : str
    m, n, sides : int
        The rows and columns of the matrix, and the right-hand sides of `solve` and `lstsq`.
    sizes : dict of str to int
        The axes of the grid and their sizes.
    dtype : str
    block : int
        Rows and columns of a tile.
    near : bool
        The ranks share memory.
    constants : Constants
        The constants of the model of time.
    rate : float or None
        Operations a second of a fast product, where it is known.
    depth : int
        The number of layers of ranks that hold tiles of the whole matrix (2.5D); 1 but for cholesky, lu and solve.
    pivoting : bool
        Of `qr`, with column pivoting.
    limit : int or None
        The bytes a rank may use, as asked for.
    faster : LinalgPlan or None
        The plan that would have been chosen without the limit, where it needs more.
    foreseen : PlannedTime or None
        The time, in `seconds`, on a machine, where one was given.
    slower : tuple of LinalgPlan
        The plans that were compared by their time on that machine, the next best first.
    """

    routine: str
    m: int
    n: int
    sides: int
    sizes: Mapping[str, int]
    dtype: str
    block: int
    near: bool
    constants: Constants
    rate: float | None = None
    depth: int = 1
    pivoting: bool = False
    limit: int | None = None
    faster: LinalgPlan | None = None
    foreseen: PlannedTime | None = field(default=None, compare=False, repr=False)
    slower: tuple[LinalgPlan, ...] = field(default=(), compare=False, repr=False)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the matrix at work: of a tall one in an `svd` R, of a wide one in `lstsq` Aᴴ.

        With pivoting it is R too, of one with many more rows than columns.
        """
        return at_work(self.routine, self.m, self.n, self.pivoting)

    @property
    def first(self) -> Deal | None:
        """The deal of the QR factorization that comes before the `svd` of a tall matrix, or one with pivoting."""
        m, n = max(self.m, self.n), min(self.m, self.n)
        long = (self.routine == "svd" or self.pivoting) and self.shape[0] < (m if self.routine == "svd" else self.m)
        return dealt("qr", m, n, self.sizes, None, self.near) if long else None

    @property
    def values(self) -> Deal | None:
        """The deal of the reduction of R of a tall matrix, of whose singular values `lstsq` takes the rank."""
        k = min(self.m, self.n)
        return dealt("svd", k, k, self.sizes, None, self.near) if self.routine == "lstsq" else None

    @cached_property
    def deal(self) -> Deal:
        """The deal of the tiles, whose `R` and `C` are the numbers of grid rows and grid columns."""
        if self.pivoting:
            return Deal(self.sizes, self.block, "wide")
        return dealt(self.routine, *self.shape, self.sizes, self.block, self.near, self.depth)

    @property
    def own_tiles(self) -> bool:
        """True if the tiles are those that the routine chooses by itself."""
        return self.pivoting or self.block == dealt(
            self.routine, *self.shape, self.sizes, None, self.near, self.depth
        ).size  # fmt: skip

    @property
    def kernel(self) -> str:
        """The factorization whose time the model of `blocks` predicts."""
        return "pivoted" if self.pivoting else kernel(self.routine)

    @property
    def layout(self) -> Layout:
        """The layout at rest that is assumed, the default one."""
        return default_layout(tuple(self.sizes), (self.m, self.n))

    @cached_property
    def costs(self) -> Costs:
        """The words and calls of every rank, part by part."""
        found, rest = Costs(self.deal, ITEMSIZE[self.dtype]), self.layout
        if self.routine == "cholesky":
            return costs.cholesky(found, rest, self.n)
        if self.routine == "lu":
            return costs.lu(found, rest, (self.m, self.n))
        if self.routine == "solve":
            other = default_layout(tuple(self.sizes), (self.n, self.sides))
            return costs.solve(found, rest, self.n, self.sides, other)
        if self.pivoting:
            before = found if self.first is None else found.with_deal(self.first)
            return costs.pivoted(before, rest, (self.m, self.n))
        if self.routine == "qr":
            return costs.qr(found, rest, (self.m, self.n))
        if (values := self.values) is not None:
            other = default_layout(tuple(self.sizes), (self.m, self.sides))
            return costs.lstsq(found, rest, (self.m, self.n), self.sides, other, values=values, alone=self.alone)
        if self.routine == "eigh":
            return costs.eigh(found, rest, self.n)
        return costs.svd(found, rest, (self.m, self.n), full_matrices=False, first=self.first, alone=self.alone)

    @property
    def busiest(self) -> int:
        """The rank that receives the most words, the first of several."""
        return int(np.argmax(self.costs.words))

    @property
    def gram(self) -> bool:
        """True if `qr`, `lstsq` or `svd` takes the way by Gram matrices, which leaves the matrix where it lies.

        With pivoting, and of `svd` unless it is `alone`, R alone goes to tiles.
        """
        shape = (max(self.m, self.n), min(self.m, self.n)) if self.routine == "svd" else (self.m, self.n)
        small = self.routine in ("qr", "lstsq") or (self.routine == "svd" and costs.small_triangle(shape, self.ranks))
        return small and tile_sizes.by_gram(shape, self.ranks)

    @property
    def alone(self) -> bool:
        """True if one of several ranks finds the singular values of `svd` or `lstsq`, of a tall matrix those of R."""
        m, n = max(self.m, self.n), min(self.m, self.n)
        if self.ranks == 1 or self.routine not in ("svd", "lstsq"):
            return False
        if self.routine == "svd":
            return svd_by_one((m, n), self.sizes)
        return by_one(n, self.sizes) if self.gram else svd_by_one((n, n), self.sizes, vectors=False)

    @property
    def words(self) -> int:
        """The words that the busiest rank receives, from the layout at rest back to it."""
        return int(self.costs.words[self.busiest])

    @property
    def messages(self) -> int:
        """The collective calls in which that rank takes part."""
        return int(self.costs.calls[self.busiest])

    @property
    def time(self) -> Time:
        """The time of the model, without the trips, in operations of a fast product."""
        deal, alone = self.deal, self.alone
        grid = (1, 1) if alone and self.routine == "svd" else (deal.R, deal.C)
        found = tile_sizes.predicted(self.kernel, *self.shape, *grid, self.block, self.constants, deal.D)
        if self.routine == "svd":
            found = found._replace(products=found.products * VECTORS)
        if (values := self.values) is not None:
            k, values = min(self.m, self.n), values if self.gram else deal
            grid = (1, 1) if alone else (values.R, values.C)
            more = tile_sizes.predicted("svd", k, k, *grid, values.size, self.constants)
            more = more._replace(products=more.products / 2)  # no vectors
            found = Time(*(x + y for x, y in zip(found, more, strict=True)))
        if (first := self.first) is not None:
            m, n = max(self.m, self.n), min(self.m, self.n)
            before = tile_sizes.predicted("qr", m, n, first.R, first.C, first.size, self.constants)
            found = Time(*(x + y for x, y in zip(found, before, strict=True)))
        return found

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of the rank that needs the most: at rest, in tiles, and in buffers and results; about."""
        return {name: size * ITEMSIZE[self.dtype] for name, size in zip(HELD, footprint(self), strict=True)}

    @property
    def need(self) -> int:
        """Bytes of that rank in all."""
        return sum(self.memory.values())

    def explain(self) -> str:
        """Return the plan's grid, tiles, words, messages, memory and time, and what was not chosen, as text."""
        from parlinalg.linalg.explain import explain

        return explain(self)


def at_work(routine: str, m: int, n: int, pivoting: bool = False) -> tuple[int, int]:
    """Return the rows and columns of the tiles of a routine; `svd` and `lstsq` have no fewer rows than columns."""
    if pivoting:
        return (n, n) if costs.by_triangle((m, n)) else (m, n)
    if routine not in ("svd", "lstsq"):
        return m, n
    m, n = max(m, n), min(m, n)
    return (n, n) if routine == "svd" and m > bidiagonal.TALL * n and n else (m, n)


def kernel(routine: str) -> str:
    """Return the factorization whose tiles a routine has."""
    return "qr" if routine == "lstsq" else routine


VECTORS = 7.5
"""The time of `svd` by that of its reduction in the model, which leaves out that half of it waits for memory: for n =
1024 LAPACK takes on one core as long as 20 n³ operations of a fast product."""


def by_one(n: int, sizes: Mapping[str, int], vectors: bool = False) -> bool:
    """Return True if one rank finds the singular values of a matrix [n, n] sooner than all do together.

    With `vectors` it finds singular vectors too.
    """
    deal = dealt("svd", n, n, sizes, None, True)
    alone, together = (
        tile_sizes.predicted("svd", n, n, rows, columns, deal.size, Constants.tuned())
        for rows, columns in ((1, 1), (deal.R, deal.C))
    )
    factor = VECTORS if vectors else 1
    return alone.products * factor <= together.total + (factor - 1) * together.products


def svd_by_one(shape: tuple[int, int], sizes: Mapping[str, int], vectors: bool = True) -> bool:
    """Return True if one rank finds the singular values of a matrix [m, n], m ≥ n, of a tall one by R, for all.

    It must be sooner, by `by_one`, and R be small (`costs.small_triangle`).  With `vectors` it finds singular vectors
    too.
    """
    return costs.small_triangle(shape, math.prod(sizes.values())) and by_one(shape[1], sizes, vectors)


def dealt(
    routine: str, m: int, n: int, sizes: Mapping[str, int], block: int | None, near: bool, depth: int = 1
) -> Deal:  # fmt: skip
    """Return how a routine deals the tiles of a matrix [m, n], by default of the size that the model chooses."""
    routine = kernel(routine)
    kind = tile_sizes.arrangement(routine, m, n, math.prod(sizes.values()), near)
    deal = Deal(sizes, 1, kind, depth)
    deal.size = tile_sizes.block_size(routine, m, n, deal.R, deal.C, deal.D) if block is None else block
    return deal


def plan_linalg(
    routine: str,
    m: SupportsIndex,
    n: SupportsIndex | None = None,
    *,
    ranks: SupportsIndex | None = None,
    sizes: Mapping[str, int] | None = None,
    sides: SupportsIndex = 1,
    block: SupportsIndex | None = None,
    dtype: object = "float64",
    memory: SupportsIndex | str | None = None,
    near: bool | None = None,
    constants: Constants | None = None,
    rate: float | None = None,
    depth: SupportsIndex | None = None,
    pivoting: bool = False,
    machine: Timing | None = None,
) -> LinalgPlan:
    """Choose the grid and the tiles for a factorization of a matrix [m, n], by default [m, m].

    Of the grids with two axes the one with the least time is chosen, in the model of `parlinalg.linalg.tile_sizes`; of
    equals the default grid, then the one with fewer rows.  For cholesky, lu and solve several layers of such grids
    (2.5D) are chosen where words and time are less by them.  If that plan needs more than `memory`, the fastest one
    that fits is chosen among all grids, numbers of layers and sizes of tiles, as far as these are not given.

    With a `machine` up to five of the plans that the model likes best and that fit are compared by their time on it:
    the routine runs on imagined ranks, and its trace is timed.  The fastest is chosen.  A routine of more than 4,096
    steps is not run; then operations, words and calls are timed by the machine's rates.  So are of the columns of
    `eigh`, `svd`, `lstsq` and `qr` with pivoting, each of which is a step or two.

    Parameters
    ----------
    routine : {"cholesky", "lu", "solve", "qr", "lstsq", "eigh", "svd"}
    ranks : int, optional
        The number of ranks, where no grid is given.
    sizes : dict of str to int, optional
        The axes of a grid and their sizes, to take this one.
    sides : int
        The right-hand sides of `solve` and `lstsq`.
    block : int, optional
        Rows and columns of a tile, to take these.
    dtype : str or dtype
    memory : int or str, optional
        Bytes a rank may use, or text such as "4GiB".
    near : bool, optional
        The ranks share memory; by default up to eight do.
    constants : Constants, optional
        Measured constants of the model; by default those of `parlinalg.tunables`.
    rate : float, optional
        Operations a second of a fast product: then the plan tells seconds.
    depth : int, optional
        The number of layers, to take this one.
    pivoting : bool
        Of `qr`: with column pivoting, `qr(A, pivoting=True)`, whose tiles have 32 columns on any grid.
    machine : Machine, optional
        What `pla.load_machine` returns, to predict times on it, and to choose by them.  Ranks of one of its nodes share
        memory.

    Raises
    ------
    ConfigError
        If the machine has no rate of products for the dtype.
    PlanError
        If the routine is unknown, an argument is not what it should be, or no plan fits the memory; then the message
        says the least memory that would do.

    Examples
    --------
    >>> plan = plan_linalg("lu", 4096, ranks=16)
    >>> plan.sizes, plan.block, plan.words
    ({'r': 4, 'c': 4}, 96, 6857220)
    """
    m, n = _checked_shape(routine, m, n)
    try:
        name, limit = dtype_name(dtype), None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if name not in DTYPES:
        raise PlanError(f"linalg takes {', '.join(DTYPES)}, not {name}")
    if (ranks is None) == (sizes is None):
        raise PlanError("give the number of ranks, or a grid, not both" if sizes else "give the number of ranks")
    count = math.prod(sizes.values()) if sizes else whole_number("ranks", ranks, 1)
    if machine is not None:
        if constants is not None or rate is not None:
            raise PlanError("a plan takes measured constants (--measure) or a machine, not both")
        if not hasattr(machine, "times_of"):
            raise PlanError(
                f"machine={machine!r} is no Machine: give what pla.load_machine returns for a name or a file"
            )
        near = machine.ranks_on_node(count) == count if near is None else near
    near = count <= tile_sizes.FEW if near is None else near
    sides = whole_number("sides", sides, 0)
    constants = Constants.tuned() if constants is None else constants
    given = None if block is None else whole_number("block", block, 1)
    wanted = None if depth is None else whole_number("depth", depth, 1)
    if not isinstance(pivoting, bool):
        raise PlanError(f"pivoting is True or False, not {pivoting!r}")
    if pivoting and routine != "qr":
        raise PlanError(f"pivoting=True is for qr, not {routine}; lu and solve always choose pivots")
    if pivoting and given is not None:
        raise PlanError(f"qr with pivoting has tiles of {PIVOTED} columns on any grid; leave block={given} out")
    if machine is not None and machine.gpus:
        if wanted not in (None, 1):
            raise PlanError(f"depth={wanted}: the ranks of {machine.name} are GPUs, which form one layer")
        wanted = 1
    if wanted is None and (near or routine not in tile_sizes.REPLICATED or not min(m, n)):
        wanted = 1
    elif wanted not in (None, 1) and routine not in tile_sizes.REPLICATED:
        raise PlanError(f"{routine} knows one layer of ranks; {', '.join(tile_sizes.REPLICATED)} know more")
    if sizes:
        grids = [(dict(sizes), d) for d in (depths(sizes) if wanted is None else [wanted])]
    else:
        grids = list(layered_grids(count, range(1, count + 1) if wanted is None else [wanted]))

    def on(grid: dict[str, int], layers: int) -> LinalgPlan:
        try:
            size = dealt(routine, *at_work(routine, m, n), grid, given, near, layers).size
        except ValueError as error:
            raise PlanError(str(error)) from None
        size = PIVOTED if pivoting else size
        return LinalgPlan(routine, m, n, sides, grid, name, size, near, constants, rate, layers, pivoting, limit)

    if not grids:
        raise PlanError(
            f"{format_count(count, 'rank')} do{'es' * (count == 1)} not form {format_count(wanted or 1, 'layer')} of "
            "as many ranks each"
        )
    plans = [on(*each) for each in grids]
    best = _fastest(plans, wanted is None)
    if limit is not None and best.need > limit:
        best = _within(limit, plans, best, free=given is None, any_depth=wanted is None)
    return best if machine is None else _by_machine(machine, best, plans)


def _by_machine(machine: Timing, best: LinalgPlan, plans: list[LinalgPlan]) -> LinalgPlan:
    """Return the fastest plan on a machine among `best` and others that fit, in the order of the model of time."""
    others: dict[tuple[int, ...], LinalgPlan] = {}
    for plan in sorted(plans, key=lambda plan: plan.time.total):
        fits = plan.limit is None or plan.need <= plan.limit
        if fits and (plan.depth in (best.depth, 1) or _layers_allowed(plan)):
            others.setdefault(_arranged(plan), replace(plan, faster=best.faster))
    others.pop(_arranged(best), None)
    compared = [best, *others.values()]
    timed = [replace(plan, foreseen=time) for plan, time in zip(compared, machine.times_of(compared), strict=False)]
    first, *rest = sorted(timed, key=lambda plan: plan.foreseen.seconds if plan.foreseen else math.inf)
    return replace(first, slower=tuple(rest))


def _arranged(plan: LinalgPlan) -> tuple[int, ...]:
    """Return the layers, rows and columns of ranks, and the rows of a tile; two grids may have the same."""
    return plan.deal.D, plan.deal.R, plan.deal.C, plan.block


def _checked_shape(routine: str, m: SupportsIndex, n: SupportsIndex | None) -> tuple[int, int]:
    """Return the rows and columns of a matrix that a routine takes and that can be planned; else raise PlanError."""
    if routine not in ROUTINES:
        raise PlanError(f"there is no plan for {routine!r}; there is one for {', '.join(ROUTINES)}")
    m = whole_number("m", m, 0)
    n = m if n is None else whole_number("n", n, 0)
    if routine in SQUARE and m != n:
        raise PlanError(f"{routine} takes square matrices, not [{m}, {n}]")
    if max(m, n) > LONGER or min(m, n) > SHORTER:
        raise PlanError(
            f"a plan counts what every row and column moves, of matrices up to {LONGER:,}×{SHORTER:,} or its "
            f"transpose, not [{m}, {n}]: give a smaller one"
        )
    return m, n


def _within(limit: int, plans: list[LinalgPlan], best: LinalgPlan, *, free: bool, any_depth: bool) -> LinalgPlan:
    """Return the fastest plan that needs at most `limit` bytes, with tiles of any size if they are `free`.

    `best` is the one without the limit.
    """
    if any_depth:
        plans = [plan for plan in plans if plan.depth == 1 or _layers_allowed(plan)]
    every = [_with_tiles(plan, best, free=free) for plan in plans]
    fitting = [[each for each in tiles if each.need <= limit] for tiles in every]
    if not any(fitting):
        least = min((each for tiles in every for each in tiles), key=lambda each: each.need)
        over, need = format_count(least.ranks, "rank"), format_bytes(least.need, up=True)
        raise PlanError(
            f"{least.routine} of {least.m}×{least.n} in {least.dtype} over {over} needs about {need} a rank on "
            f"{grid_and_tiles(least)}, more than {format_bytes(limit)}, and no other plan needs less; give that or "
            "more ranks"
        )
    return _fastest([tiles[0] for tiles in fitting if tiles], any_depth)


def _fastest(plans: list[LinalgPlan], any_depth: bool) -> LinalgPlan:
    """Return the plan with the least time; with `any_depth` several layers must be worth their words and memory."""
    return min(_worth(plans) if any_depth else plans, key=lambda each: each.time.total)


def _with_tiles(plan: LinalgPlan, best: LinalgPlan, *, free: bool) -> list[LinalgPlan]:
    """Return a plan with its tiles or, if they are `free`, with each size, in the order in which these are preferred.

    They are ordered by time.  The time of reductions hardly depends on tiles: there wide ones come first.
    """
    sizes = [plan.block]
    if free and not plan.pivoting:
        most = tile_sizes.candidates(kernel(plan.routine), *plan.shape, plan.deal.R, plan.deal.C)[-1]
        sizes = [b for b in reversed(tile_sizes.SIZES) if b <= most]
    plans = [replace(plan, block=b, faster=best) for b in sizes]
    return plans if plan.routine in tile_sizes.REDUCTIONS else sorted(plans, key=lambda each: each.time.total)


def _layers_allowed(plan: LinalgPlan) -> bool:
    """Return True if the tiles of a rank of several layers take no more than the planner gives them unasked."""
    return tile_sizes.tile_bytes(plan.deal, *plan.shape, ITEMSIZE[plan.dtype]) <= tunables.LAYER_BYTES


def _worth(plans: list[LinalgPlan]) -> list[LinalgPlan]:
    """Return the plans with one layer; if others save words and time, the best of those alone."""

    def compared(plan: LinalgPlan) -> tuple[float, float]:
        return tile_sizes.compared(plan.routine, *plan.shape, plan.deal, plan.constants)

    flat = [plan for plan in plans if plan.depth == 1]
    if not flat or len(flat) == len(plans):
        return plans
    best = min(map(compared, flat), key=lambda each: each[1])
    found = [
        plan for plan in plans if plan.depth > 1 and tile_sizes.saves(compared(plan), best) and _layers_allowed(plan)
    ]
    if not found:
        return flat
    words = min(flat, key=lambda plan: plan.time.total).words
    for plan in sorted(found, key=lambda plan: compared(plan)[1]):
        if plan.words < words:  # counted exactly, and at the rank that receives the most
            return [plan]
    return flat


def layered_grids(ranks: int, depths: Iterable[int]) -> Iterator[tuple[dict[str, int], int]]:
    """Yield all grids of two axes, and of three where the first has several layers."""
    for depth in depths:
        if ranks % depth == 0:
            yield from (({"d": depth, **grid} if depth > 1 else grid, depth) for grid in two_axis_grids(ranks // depth))


def two_axis_grids(ranks: int) -> list[dict[str, int]]:
    """Return all grids of two axes, the default one first."""
    columns = [d for d in range(1, ranks + 1) if ranks % d == 0]
    found = [{"r": ranks // c, "c": c} for c in reversed(columns)]
    first = max(c for c in columns if c * c <= ranks)
    return sorted(found, key=lambda sizes: sizes["c"] != first)


def grid_and_tiles(plan: LinalgPlan) -> str:
    """Return the grid and the tiles of a plan as text."""
    deal = plan.deal
    return f"{layers_text(deal)}{deal.R}×{deal.C} with tiles of {plan.block}"


def layers_text(deal: Deal) -> str:
    return f"{deal.D} layers of " if deal.D > 1 else ""
