"""The Newton–Schulz iteration of Muon, for matrices however they are cut: three executions, and what each costs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from parlinalg import tunables
from parlinalg.array import DistArray
from parlinalg.backend.kernels import optimizers
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, span_of
from parlinalg.matmul.execute import execute
from parlinalg.moves import moves
from parlinalg.optim.flat import Entry
from parlinalg.optim.matrices import (
    Exchange,
    Matrix,
    Slots,
    at_home,
    balanced,
    extent,
    in_blocks,
    in_slices,
    matrices_of,
    resting,
    split_of,
)
from parlinalg.plan import Plan

Block = Any
Coefficients = tuple[float, float, float]
PUBLISHED: Coefficients = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: as steep at 0 as can be, so that five steps bring singular values to between 0.7 and 1.2."""
LEAST_NORM = 1e-7


@dataclass(frozen=True)
class Iteration:
    """Newton–Schulz: so many steps with these coefficients."""

    steps: int = 5
    coefficients: Coefficients = PUBLISHED


def newton_schulz(x: Block, norm: float, iteration: Iteration) -> Block:
    """Return a matrix with its singular values taken near 1.

    Parameters
    ----------
    x : array
        Of two dims.
    norm : float
        Its Frobenius norm; it counts as 1e-7 at least.
    iteration : Iteration

    Examples
    --------
    >>> import numpy as np
    >>> x = newton_schulz(np.diag([3.0, 0.1, 0.5]), np.sqrt(9.26), Iteration())
    >>> np.diag(x).round(2).tolist()
    [0.71, 1.13, 1.04]
    """
    a, b, c = iteration.coefficients
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / max(norm, LEAST_NORM)
    for _ in range(iteration.steps):
        product = quadratic(x @ x.T, b, c) @ x
        x *= a
        product += x
        x = product
    return x.T if tall else x


def quadratic(a: Block, b: float, c: float) -> Block:
    """Return `b a + c a²` of a square matrix, which is overwritten."""
    found = a @ a
    found *= c
    a *= b
    found += a
    return found


def flops(short: int, long: int) -> int:
    """Return the flops of a step for a matrix with these sides: X Xᵀ, A², and the product with X.

    >>> flops(2, 3)
    64
    """
    return 2 * short * short * (2 * long + short)


@dataclass(frozen=True)
class Cost:
    """The cost of an execution for the rank that has the most to do in a step of the optimizer.

    Attributes
    ----------
    flops : int
        Floating-point operations of the products.
    words : int
        Elements received, at most.
    calls : int
        Collective calls.
    """

    flops: int
    words: int
    calls: int

    @property
    def total(self) -> int:
        """The flops that take as long: a word counts as `tunables.WORD_FLOPS`, a call as `tunables.CALL_FLOPS`."""
        return self.flops + tunables.WORD_FLOPS * self.words + tunables.CALL_FLOPS * self.calls


class Team:
    """The parameters of one grid and dtype whose matrices are orthogonalized together.

    Parameters
    ----------
    entries : sequence of Entry
    grid : Grid
    iterations : sequence of Iteration
        Of each parameter.

    Attributes
    ----------
    matrices : list of Matrix
        All of all parameters.
    rest : list of lists of Slot
        What each rank of the grid updates.
    """

    def __init__(self, entries: Sequence[Entry], grid: Grid, iterations: Sequence[Iteration]) -> None:
        self.grid, self.entries, self.iterations = grid, list(entries), list(iterations)
        self.splits = [split_of(e.parameter) for e in self.entries]
        self.matrices: list[Matrix] = []
        self.first: list[int] = []
        """The number of each parameter's first matrix."""
        for i, entry in enumerate(self.entries):
            self.first.append(len(self.matrices))
            self.matrices += matrices_of(i, entry.data.shape, self.splits[i])
        self.rest = resting(self.entries, grid)

    @cached_property
    def resting(self) -> list[dict[int, Slots]]:
        """For each rank of the grid its slots at rest by the number of their parameter."""
        found: list[dict[int, Slots]] = [{} for _ in self.rest]
        for slots, of_rank in zip(self.rest, found, strict=True):
            for slot in slots:
                of_rank.setdefault(slot.tensor, []).append(slot)
        return found

    @property
    def shared(self) -> bool:
        """True if ranks share the update of a parameter."""
        return any(e.partition.axes for e in self.entries)

    def steps(self, matrix: Matrix) -> int:
        """Return the steps of Newton–Schulz of a matrix."""
        return self.iterations[matrix.tensor].steps

    def repeated(self, *, work: bool = False) -> list[Cut]:
        """Return for each parameter the axes along which ranks update the same; with `work`, have the same block."""
        found = []
        for e in self.entries:
            cut = e.data.layout.cut_axes if work else (*e.data.layout.cut_axes, *e.partition.axes)
            found.append(tuple(a for a in self.grid.axes if a not in cut))
        return found


class Execution(ABC):
    """A way to bring the matrices of a team together and to iterate on them."""

    NAME: ClassVar[str]

    def __init__(self, team: Team) -> None:
        self.team, self.grid = team, team.grid

    @abstractmethod
    def cost(self) -> Cost:
        """Return the cost of a step."""

    @cached_property
    def slots(self) -> list[Slots]:
        """Return the parts of matrices that every rank has at work."""
        return self.at_work()

    @abstractmethod
    def at_work(self) -> list[Slots]:
        """Return the parts of matrices that every rank has at work."""

    @cached_property
    def bring(self) -> Exchange:
        """From rest to work."""
        return Exchange(self.grid, self.team.rest, self.slots, self.team.repeated())

    @cached_property
    def back(self) -> Exchange:
        """From work to rest."""
        return Exchange(self.grid, self.slots, self.team.rest, [()] * len(self.team.entries))

    def run(self, buffer: Block) -> None:
        """Orthogonalize the matrices, of which the buffer has this rank's elements, in place.  Collective."""
        held = self.grid.backend.empty((self.bring.size,), buffer.dtype)
        self.bring.run(buffer, held, self.grid.backend)
        self.iterate(held, self.slots[self.grid.everyone.rank])
        self.back.run(held, buffer, self.grid.backend)

    @abstractmethod
    def iterate(self, held: Block, slots: Slots) -> None:
        """Orthogonalize the matrices in place, of which this rank has these slots."""


class AtHome(Execution):
    """Each matrix is brought to a home rank, which iterates on it alone; the homes have about the same to do."""

    NAME = "home"

    @cached_property
    def homes(self) -> list[int]:
        """The home of each matrix."""
        return balanced([self._flops(m) for m in self.team.matrices], self.grid.size, self._held)

    def _flops(self, m: Matrix) -> int:
        return self.team.steps(m) * flops(m.short, m.long)

    def _held(self, number: int, rank: int) -> int:
        """Return how many elements of a matrix a rank has at rest."""
        m = self.team.matrices[number]
        return sum(s.overlap(m.rect) for s in self.team.resting[rank].get(m.tensor, ()))

    def cost(self) -> Cost:
        """Return the flops of the fullest home; its elements in, and those of the fullest rest out."""
        ranks = self.grid.size
        work, elements = [0] * ranks, [0] * ranks
        for m, home in zip(self.team.matrices, self.homes, strict=True):
            work[home] += self._flops(m)
            elements[home] += m.size
        several = ranks > 1
        return Cost(max(work), several * (max(elements) + max(map(extent, self.team.rest))), 2 * several)

    def at_work(self) -> list[Slots]:
        return at_home(self.team.matrices, self.homes, self.grid.size)

    def iterate(self, held: Block, slots: Slots) -> None:
        for slot in slots:
            m = self.team.matrices[slot.matrix]
            x = slot.view(held).reshape(m.rows, m.columns)
            norm = math.sqrt(float(optimizers.square_sum(x.reshape(-1))))
            x[...] = newton_schulz(x, norm, self.team.iterations[m.tensor])


class ByGram(Execution):
    """The ranks have slices of each matrix's longer side; all Gram matrices are summed in one all-reduce a step."""

    NAME = "gram"

    def cost(self) -> Cost:
        """Return the flops and words of a rank.

        Flops are its share of the products with X, and A² of all matrices; words its share of the elements in, the
        fullest rest out, and twice the elements of all Gram matrices a step.
        """
        ranks, matrices = self.grid.size, self.team.matrices
        work = sum(self.team.steps(m) * flops(m.short, -(-m.long // ranks)) for m in matrices)
        words = sum(m.size for m in matrices) // ranks + max(map(extent, self.team.rest))
        words += 2 * sum(self.team.steps(m) * m.short**2 for m in matrices)
        several = ranks > 1
        return Cost(work, several * words, several * (3 + max(map(self.team.steps, matrices), default=0)))

    def at_work(self) -> list[Slots]:
        return in_slices(self.team.matrices, self.team.entries, self.grid)

    def iterate(self, held: Block, slots: Slots) -> None:
        matrices, backend = self.team.matrices, self.grid.backend
        slices: list[list[Block]] = [[] for _ in matrices]
        squares = backend.zeros((len(matrices),), np.float64)
        for slot in slots:
            m, x = matrices[slot.matrix], slot.view(held)
            squares[slot.matrix] += optimizers.square_sum(x.reshape(-1))
            slices[slot.matrix].append(x.reshape(m.rows, -1) if m.rows < m.columns else x.reshape(-1, m.columns).T)
        for parts, norm in zip(slices, _norms(squares, self.grid), strict=True):
            for x in parts:
                x /= norm
        room = backend.empty((sum(m.short**2 for m in matrices),), held.dtype)
        for step in range(max(map(self.team.steps, matrices), default=0)):
            due = [n for n, m in enumerate(matrices) if step < self.team.steps(m)]
            grams = room[: sum(matrices[n].short ** 2 for n in due)]
            grams[...] = 0
            sums, at = {}, 0
            for n in due:
                k = matrices[n].short
                sums[n] = grams[at : at + k * k].reshape(k, k)
                at += k * k
                for x in slices[n]:
                    sums[n] += x @ x.T
            self.grid.everyone.all_reduce(grams)
            for n in due:
                a, b, c = self.team.iterations[matrices[n].tensor].coefficients
                q = quadratic(sums[n], b, c) if slices[n] else None
                for x in slices[n]:
                    product = q @ x
                    x *= a
                    x += product


class OnGrid(Execution):
    """The weights stay in the blocks that their layouts cut, and products over the grid iterate on them.

    What ZeRO shares is gathered first, and ranks that have the same block compute the same.
    """

    NAME = "grid"

    @cached_property
    def products(self) -> list[Products | None]:
        """The products of each parameter; None if it has no elements."""
        return [
            Products(e.data.layout, e.data.shape, split) if e.data.size else None
            for e, split in zip(self.team.entries, self.team.splits, strict=True)
        ]

    def cost(self) -> Cost:
        """Return the products' flops and words by their plans, and the gather of what ZeRO shares."""
        sizes, at = self.grid.sizes, dict.fromkeys(self.grid.axes, 0)
        work, calls = 0, 2 if self.grid.size > 1 else 0
        words = sum(_elements(e, sizes, at) for e in self.team.entries if e.partition.axes)
        for m in self.team.matrices:
            cut = span_of(self.team.entries[m.tensor].data.layout.cut_axes, sizes)
            work += -(-self.team.steps(m) * flops(m.short, m.long) // cut)
        for products, iteration in zip(self.products, self.team.iterations, strict=True):
            if products is not None:
                words += iteration.steps * products.words(sizes, at)
                calls += iteration.steps * products.calls(sizes)
        return Cost(work, words, calls)

    def at_work(self) -> list[Slots]:
        return in_blocks(self.team.entries, self.grid)

    @cached_property
    def bring(self) -> Exchange:
        team = self.team
        return Exchange(self.grid, team.rest, self.slots, team.repeated(), moves=team.shared)

    @cached_property
    def back(self) -> Exchange:
        return Exchange(self.grid, self.slots, self.team.rest, self.team.repeated(work=True), moves=False)

    def iterate(self, held: Block, slots: Slots) -> None:
        team, backend = self.team, self.grid.backend
        squares, rows = backend.zeros((len(team.matrices),), np.float64), {}
        for slot in slots:
            entry, (batch, _) = team.entries[slot.tensor], team.splits[slot.tensor]
            if not entry.data.size:
                continue
            counts = entry.data.shape[:batch]
            numbers = team.first[slot.tensor] + np.arange(math.prod(counts)).reshape(counts)
            mine = numbers[tuple(slice(r.start, r.stop) for r in slot.rect[:batch])].reshape(-1)
            parts = slot.view(held).reshape(len(mine), -1) if slot.size else mine[:0]
            rows[slot.tensor] = list(zip(mine.tolist(), parts, strict=bool(slot.size)))
            free = (a for a in self.grid.axes if a not in entry.data.layout.cut_axes)
            if not any(self.grid.coords[a] for a in free):
                for number, x in rows[slot.tensor]:
                    squares[number] += optimizers.square_sum(x)
        norms = _norms(squares, self.grid)
        for slot in slots:
            products = self.products[slot.tensor]
            if products is None:
                continue
            for number, x in rows[slot.tensor]:
                x /= norms[number]
            data = team.entries[slot.tensor].data
            x = DistArray(slot.view(held), data.shape, data.layout, self.grid)
            slot.view(held)[...] = products.iterated(x, team.iterations[slot.tensor]).block


class Products:
    """The products of the iteration for a parameter in a layout: X Xᵀ, A² and P X, over its batch dims.

    X has the shorter group of dims first.  Where axes r cut the first group of X and axes c the second, A rests (r, c):
    X Xᵀ gathers Xᵀ along r and is reduce-scattered along c; A² and P X gather their operands along c and along r.

    Parameters
    ----------
    layout : Layout
    shape : tuple of int
    split : tuple of two ints
        As `Parameter.matrix`.

    Attributes
    ----------
    gram, square, apply : Plan
    """

    def __init__(self, layout: Layout, shape: Sequence[int], split: tuple[int, int]) -> None:
        batch, middle = split[0], split[0] + split[1]
        head, first, second = (tuple(range(*at)) for at in ((0, batch), (batch, middle), (middle, len(shape))))
        if math.prod(shape[batch:middle]) > math.prod(shape[middle:]):
            first, second = second, first
        self.order = (*head, *first, *second)
        """The permutation from the parameter to X."""
        self.turned = (*head, *range(batch + len(first), len(shape)), *range(batch, batch + len(first)))
        """The permutation from X to Xᵀ."""
        self.shape = tuple(shape[d] for d in self.order)
        self.gram_shape = (*self.shape[: batch + len(first)], *self.shape[batch : batch + len(first)])
        b, m, k = (tuple(layout.dims[d] for d in group) for group in (head, first, second))
        whole: tuple[Cut, ...] = ((),) * len(first)
        spread: tuple[Cut, ...] = (tuple(a for cut in k for a in cut), *whole[1:])
        x, gram = layout.permuted(self.order), Layout(*b, *m, *spread)
        self.gram = Plan(m=m, n=whole, k=k, x=x, w=x.permuted(self.turned), y=gram, b=b)
        self.square = Plan(m=m, n=spread, k=whole, x=gram, w=gram, y=gram, b=b)
        self.apply = Plan(m=m, n=k, k=whole, x=gram, w=x, y=x, b=b)

    def _operands(self) -> list[tuple[Plan, tuple[int, ...], tuple[int, ...]]]:
        turned = tuple(self.shape[d] for d in self.turned)
        return [
            (self.gram, self.shape, turned),
            (self.square, self.gram_shape, self.gram_shape),
            (self.apply, self.gram_shape, self.shape),
        ]

    def words(self, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
        """Return the elements that a rank receives in a step of the iteration."""
        return sum(plan.words(x, w, sizes, coords) for plan, x, w in self._operands())

    def calls(self, sizes: Mapping[str, int]) -> int:
        """Return the collective calls of a step of the iteration."""
        plans = (self.gram, self.square, self.apply)
        ways = [way for p in plans for way in ((p.x, p.x_work), (p.w, p.w_work), (p.y_work, p.y))]
        return sum(len(moves(here, there, sizes)) for here, there in ways)

    def iterated(self, value: DistArray, iteration: Iteration) -> DistArray:
        """Return the iterated parameter; the one given is overwritten.  Collective over the axes that cut it."""
        a, b, c = iteration.coefficients
        x = value.transpose(self.order)
        for _ in range(iteration.steps):
            gram = execute(self.gram, x, x.transpose(self.turned))
            operand = value.like(gram, self.gram.y, self.gram_shape)
            square = execute(self.square, operand, operand)
            square *= c
            gram *= b
            square += gram
            del gram
            operand = operand.like(square)
            product, term = execute(self.apply, operand, x), x.block
            term *= a
            product += term
            x = value.like(product, self.apply.y, self.shape)
        return x.transpose(tuple(self.order.index(d) for d in range(len(self.order))))


def _norms(squares: Block, grid: Grid) -> list[float]:
    """Return the norms of all matrices, at least 1e-7, from this rank's sums of squares.  Collective."""
    grid.everyone.all_reduce(squares)
    # One by one: an imagined array has numbers, but no list of them.
    return [float(norm) for norm in np.maximum(np.sqrt(grid.backend.to_host(squares)), LEAST_NORM)]


def _elements(entry: Entry, sizes: Mapping[str, int], coords: Mapping[str, int]) -> int:
    return math.prod(entry.data.layout.block_shape(entry.data.shape, sizes, coords))


def executions() -> dict[str, type[Execution]]:
    """Return the executions by their names."""
    return {kind.NAME: kind for kind in (AtHome, ByGram, OnGrid)}


def choose(team: Team, name: str | None = None) -> Execution:
    """Return the execution of this name, by default the one with the least total cost, the first of several."""
    kinds = executions()
    if name is not None:
        return kinds[name](team)
    return min((kind(team) for kind in kinds.values()), key=lambda execution: execution.cost().total)
