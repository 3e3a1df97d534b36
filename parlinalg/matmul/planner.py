"""The choice of grid and kernel for a product `C[m, n] = A[m, k] B[k, n]` over a number of ranks.  Pure: no MPI.

On a pm×pn×pk grid whose ranks all hold an even share of A, B and C, a rank receives
W = (mk/(pm·pk))(1−1/pn) + (kn/(pk·pn))(1−1/pm) + (mn/(pm·pn))(1−1/pk) words: A is gathered along n, B along m, and C is
reduce-scattered along k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

from parlinalg.errors import PlanError, counted
from parlinalg.layout import Layout
from parlinalg.matmul import bounds
from parlinalg.plan import Plan
from parlinalg.units import ITEMSIZE, dtype_name, format_bytes, parse_bytes

if TYPE_CHECKING:
    from parlinalg.grid import Grid

Factors = tuple[int, int, int]
Seconds = Callable[[Factors], tuple[float, float]]  # of a grid: its largest block product, its communication
MARGIN = Fraction(11, 10)  # a grid may give a rank at most this times the least possible largest block product


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Needs(NamedTuple):
    """Elements that the fullest rank holds on a pm×pn×pk grid.

    `x`, `w`, `y`: the gathered A, the gathered B, the unsummed C; 0 where the matrix does not move, since the product
    then works on the block at rest.  `rest`: the blocks of A, B and C.  `m`, `n`, `k`: the extents of a rank's brick.
    """

    m: int
    n: int
    k: int
    rest: int
    x: int
    w: int
    y: int

    @classmethod
    def of(cls, m: int, n: int, k: int, pm: int, pn: int, pk: int) -> Needs:
        m, n, k = ceil_div(m, pm), ceil_div(n, pn), ceil_div(k, pk)
        rest = m * ceil_div(k, pn) + ceil_div(k, pm) * n + m * ceil_div(n, pk)
        return cls(m, n, k, rest, m * k * (pn > 1), k * n * (pm > 1), m * n * (pk > 1))

    def streamed(self) -> tuple[tuple[str, int, int, int], ...]:
        """Yield the matrices that may be kept whole: (name, extent streamed, elements besides the panels, panels).

        The last counts two panels of width one: while one is multiplied, the next one arrives.
        """
        m, n, k, rest, x, w, y = self
        return (
            ("y", k, rest + y, 2 * (m * (x > 0) + n * (w > 0))),
            ("x", n, rest + x, 2 * (k * (w > 0) + m * (y > 0))),
            ("w", m, rest + w, 2 * (k * (x > 0) + n * (y > 0))),
        )


class PlannedKernel(NamedTuple):
    """A kernel and the elements a rank needs with it; `panel` and `stationary` are None where all is gathered."""

    kernel: str
    panel: int | None
    stationary: str | None
    words: int


def least_words(needs: Needs) -> int:
    """Return the fewest elements with which a product can be done: gathered, or streamed with panels of width one."""
    gathered = needs.rest + needs.x + needs.w + needs.y
    return min([gathered, *(base + width for _, extent, base, width in needs.streamed() if extent)])


def kernel_for(needs: Needs, limit: int | None) -> PlannedKernel | None:
    """Return the kernel: whole gathered operands if they fit `limit` elements, else the stream of fewest panels.

    Ties go to the stationary y, then x, then w.  None where nothing fits.
    """
    gathered = needs.rest + needs.x + needs.w + needs.y
    if limit is None or gathered <= limit:
        return PlannedKernel("gather", None, None, gathered)
    fitting: list[tuple[int, int, PlannedKernel]] = []
    for place, (stationary, extent, base, width) in enumerate(needs.streamed()):
        panel = min(extent, (limit - base) // width) if width else 0  # of width 0: nothing moves but what is kept whole
        if panel > 0:
            fitting.append(
                (ceil_div(extent, panel), place, PlannedKernel("stream", panel, stationary, base + panel * width))
            )
    return min(fitting)[2] if fitting else None


class Problem(NamedTuple):
    """A product to plan: its sizes, the ranks there are, the dtype and the bytes a rank may use (None: any)."""

    m: int
    n: int
    k: int
    ranks: int
    dtype: str
    memory: int | None

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def limit(self) -> int | None:
        """The elements a rank may hold."""
        return None if self.memory is None else self.memory // self.itemsize

    def words(self, factors: Factors) -> Fraction:
        """Return W, exactly: with p = pm·pn·pk ranks, W·p = mk(pn−1) + kn(pm−1) + mn(pk−1)."""
        pm, pn, pk = factors
        return Fraction(self.words_of_all(pm, pn, pk), pm * pn * pk)

    def words_of_all(self, pm: int, pn: int, pk: int) -> int:
        m, n, k = self.m, self.n, self.k
        return m * k * (pn - 1) + k * n * (pm - 1) + m * n * (pk - 1)

    def block(self, factors: Factors) -> int:
        """Return the largest block product: multiplications of the busiest rank."""
        pm, pn, pk = factors
        return ceil_div(self.m, pm) * ceil_div(self.n, pn) * ceil_div(self.k, pk)

    def least_block(self) -> int:
        """Return the least largest block product over all grids: the one with the most ranks along k."""
        return min(self.block((pm, pn, self.ranks // (pm * pn))) for pm, pn in self._pairs())

    def balanced(self, least: int) -> Iterator[tuple[int, int, range]]:
        """Return all pm, pn and the range of pk for which the block product is within the margin of the least."""
        allowed = least * MARGIN.numerator // MARGIN.denominator
        for pm, pn in self._pairs():
            face = ceil_div(self.m, pm) * ceil_div(self.n, pn)
            most = self.ranks // (pm * pn)
            if face * self.k == 0:
                yield pm, pn, range(1, most + 1)
            elif allowed // face and (fewest := ceil_div(self.k, allowed // face)) <= most:
                yield pm, pn, range(fewest, most + 1)

    def _pairs(self) -> Iterator[tuple[int, int]]:
        for pm in range(1, self.ranks + 1):
            for pn in range(1, self.ranks // pm + 1):
                yield pm, pn

    def order(self, factors: Factors) -> tuple[Fraction, int, int, int, int, int]:
        """Return the search's objective: words, then messages; ties by balance, then few ranks along k, n and m."""
        pm, pn, pk = factors
        return self.words(factors), messages(factors), self.block(factors), pk, pn, pm

    def needs(self, factors: Factors) -> Needs:
        return Needs.of(self.m, self.n, self.k, *factors)


def messages(factors: Factors) -> int:
    """Return the blocks that a rank receives: one from each other rank that shares its A, its B or its C."""
    return sum(factors) - 3


@dataclass(frozen=True)
class MatmulPlan:
    """A grid and a kernel for `C[m, n] = A[m, k] B[k, n]`, as `plan_matmul` finds them.

    Attributes
    ----------
    m, n, k : int
        The sizes of the product.
    ranks : int
        The ranks there are; the grid takes the first pm·pn·pk of them, the others are idle.
    dtype : str
    limit : int or None
        The bytes a rank may use, as asked for.
    factors : tuple of int
        (pm, pn, pk): into how many parts m, n and k are cut.
    kernel : {"gather", "stream"}
        Operands are gathered whole, or streamed in panels of bounded width.
    panel : int or None
        Streamed: the widest panel, in rows or columns of the dim that is streamed.
    stationary : {"x", "w", "y"} or None
        Streamed: the matrix a rank keeps whole at work (x is A, w is B, y is C).  The panels run over the dim it lacks:
        n, m or k.
    memory : int
        Bytes a rank needs: its blocks of A, B and C and the kernel's buffers.
    """

    m: int
    n: int
    k: int
    ranks: int
    dtype: str
    limit: int | None
    factors: Factors
    kernel: str
    panel: int | None
    stationary: str | None
    memory: int

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of the grid and their sizes."""
        return dict(zip("mnk", self.factors, strict=True))

    @property
    def words(self) -> float:
        """Elements a rank receives in the product, with blocks cut evenly (the mean over the ranks)."""
        return float(self._problem.words(self.factors))

    @property
    def messages(self) -> int:
        """Blocks a rank receives: (pm − 1) + (pn − 1) + (pk − 1); a streamed kernel cuts each into its panels."""
        return messages(self.factors)

    @property
    def working_ranks(self) -> int:
        """The ranks in the grid, pm·pn·pk."""
        pm, pn, pk = self.factors
        return pm * pn * pk

    @property
    def bound(self) -> float:
        """The least words a rank can receive if the working ranks share data and work evenly, whatever their memory."""
        return bounds.memory_independent(self.m, self.n, self.k, self.working_ranks)

    @property
    def limited_bound(self) -> float | None:
        """The same with the memory limit taken into account; None without a limit."""
        limit = self._problem.limit
        return None if limit is None else bounds.memory_limited(self.m, self.n, self.k, self.working_ranks, limit)

    @property
    def plan(self) -> Plan:
        """The plan of the product on axes "m", "n", "k", with A, B and C cut evenly over all ranks at rest."""
        return Plan(
            m=(("m",),), n=(("n",),), k=(("k",),),
            x=Layout("m", ("k", "n")), w=Layout(("k", "m"), "n"), y=Layout("m", ("n", "k")),
        )  # fmt: skip

    def make_grid(self, comm: object = None, backend: str = "auto") -> Grid:
        """Return the grid on the first pm·pn·pk ranks of `comm`; collective over all of them.

        The remaining ranks hold blocks of size zero and may make every call.
        """
        from parlinalg.grid import Grid

        return Grid(self.sizes, comm, backend, idle=True)

    def explain(self, seconds: Seconds | None = None) -> str:
        """Return why this is the plan: words, lower bound, ratio, memory, who is idle, and why the runners-up lost.

        With `parlinalg.planning.machine.product_seconds(plan, machine)` also the times of this grid and of the
        runners-up.
        """
        from parlinalg.matmul.explain import explain

        return explain(self, seconds)

    @property
    def _problem(self) -> Problem:
        return Problem(self.m, self.n, self.k, self.ranks, self.dtype, self.limit)


def plan_matmul(
    m: SupportsIndex,
    n: SupportsIndex,
    k: SupportsIndex,
    ranks: SupportsIndex,
    dtype: object = "float64",
    memory: SupportsIndex | str | None = None,
) -> MatmulPlan:
    """Choose the grid and the kernel for `C[m, n] = A[m, k] B[k, n]` over `ranks` ranks.

    Candidates are the grids pm×pn×pk ≤ ranks that fit the memory limit and whose largest local product,
    ⌈m/pm⌉⌈n/pn⌉⌈k/pk⌉ multiplications, is within 10% of the least possible.  The one that moves the fewest words is
    chosen; of equal ones that with the fewest messages (pm + pn + pk − 3), then with the smallest local product, then
    with fewer ranks along k (no sums to reduce), along n, and along m.

    Parameters
    ----------
    m, n, k : int
        Sizes of the product, zero allowed.
    ranks : int
        The ranks at hand; the plan may leave some idle, as one of 65 for a product of cubic shape (4×4×4).
    dtype : str or dtype
        Of A, B and C.
    memory : int or str, optional
        Bytes a rank may use for its blocks of A, B and C and for the kernel's buffers, or text such as "4GiB".  Whole
        gathered copies are preferred; where they do not fit, the operands are streamed in the widest panels that do.

    Returns
    -------
    MatmulPlan
        `factors` is (pm, pn, pk), `words` what a rank receives on average, `bound` the least possible; `explain()`
        says why others lost.

    Raises
    ------
    PlanError
        If a size is negative or no number, there is no rank, the dtype or the memory is not understood, or no grid
        fits the memory; then the message says the least memory that would do.

    Examples
    --------
    >>> plan_matmul(4096, 4096, 4096, ranks=65).factors
    (4, 4, 4)
    """
    name, limit = _understood(dtype, memory)
    problem = Problem(
        whole_number("m", m, 0), whole_number("n", n, 0), whole_number("k", k, 0), whole_number("ranks", ranks, 1),
        name, limit,
    )  # fmt: skip
    least = problem.least_block()
    factors = _best(problem, least)
    if factors is None:
        raise PlanError(_too_little(problem, least))
    chosen = kernel_for(problem.needs(factors), problem.limit)
    if chosen is None:
        raise RuntimeError(f"{factors} was found to fit, but has no kernel")  # a bug of ours
    return MatmulPlan(
        *problem[:5], limit=problem.memory, factors=factors, kernel=chosen.kernel, panel=chosen.panel,
        stationary=chosen.stationary, memory=chosen.words * problem.itemsize,
    )  # fmt: skip


def _best(problem: Problem, least: int) -> Factors | None:
    """Return the first grid in the problem's order that is balanced and fits the memory."""
    m, n, k, limit = problem.m, problem.n, problem.k, problem.limit
    best: Factors | None = None
    best_words = float("inf")
    for pm, pn, pks in problem.balanced(least):
        # W·pm·pn = mn + (mk(pn−1) + kn(pm−1) − mn)/pk goes one way with pk: the first that fits is this pair's best
        falls = m * k * (pn - 1) + k * n * (pm - 1) > m * n
        for pk in reversed(pks) if falls else pks:
            words = problem.words_of_all(pm, pn, pk) / (pm * pn * pk)  # rounded correctly: never reverses an order
            if words > best_words:
                break
            factors = (pm, pn, pk)
            if limit is None or least_words(problem.needs(factors)) <= limit:
                if best is None or problem.order(factors) < problem.order(best):
                    best, best_words = factors, words
                break
    return best


def _too_little(problem: Problem, least: int) -> str:
    grids = ((pm, pn, pk) for pm, pn, pks in problem.balanced(least) for pk in pks)
    words, factors = min((least_words(problem.needs(f)), f) for f in grids)
    need = words * problem.itemsize
    m, n, k, ranks, dtype, memory = problem
    enough = f"{need} bytes ({format_bytes(need, up=True)}), for a {'×'.join(map(str, factors))} grid"
    return (
        f"{m}×{n}×{k} in {dtype} over {counted(ranks, 'rank')} does not fit {format_bytes(memory or 0)} a rank: the "
        f"least that would do is {enough}; give that or more ranks"
    )


def whole_number(name: str, value: object, least: int) -> int:
    """Return an argument of a planner as an int; raise a PlanError unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value.__index__() < least:
        raise PlanError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value.__index__()


def _understood(dtype: object, memory: SupportsIndex | str | None) -> tuple[str, int | None]:
    try:
        return dtype_name(dtype), None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise PlanError(str(error)) from None
