"""The plan of a distributed Fourier transform: the layouts in which its dims are whole, one group after another.

A dim must be whole to be transformed by this process.  Its axes go to other dims meanwhile (a transpose: one
all-to-all), as in P3DFFT and mpi4py-fft, or are gathered where the other dims have no items left to cut.  A line may
also stay cut: if it has n = n₁ n₂ points, n₁ transforms of n₂ points and n₂ of n₁ make one, with three transposes (the
four-step algorithm: Bailey, "FFTs in external or hierarchical memory", 1990).

The rule: of all such sequences take the one that moves the fewest bytes, where a move counts as the rank that receives
the most; of several, the one with the fewest messages; then the one whose axes go to the first dims.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations, count, product
from typing import Any

import numpy as np

from parlinalg.layout import Cut, Layout, span, span_of

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
Left = tuple[int, ...]
"""The lines that are not transformed yet, by their places in `Problem.lines`."""


@dataclass(frozen=True)
class Span:
    """The cut of a dim: groups of `unit` items, `n` of them, in balanced pieces; the items end at `end`."""

    n: int
    cut: Cut = ()
    unit: int = 1
    end: int | None = None

    def at(self, sizes: Sizes, coords: Mapping[str, int]) -> range:
        """Return the items that the rank at `coords` holds."""
        groups, end = span(self.n, self.cut, sizes, coords), self.n * self.unit if self.end is None else self.end
        return range(min(end, groups.start * self.unit), min(end, groups.stop * self.unit))

    @property
    def items(self) -> int:
        return self.n * self.unit if self.end is None else self.end


def spans(layout: Layout, shape: Shape) -> tuple[Span, ...]:
    """Return the cuts of the dims of an array of this shape by a layout."""
    return tuple(Span(n, cut) for n, cut in zip(shape, layout.dims, strict=True))


@dataclass(frozen=True)
class Exchange:
    """A move from one way to cut the dims to another; the items are numbered alike in both, and some may be left out.

    Attributes
    ----------
    have, want : tuple of Span
        One entry a dim.
    itemsize : int
        Bytes of an element.
    """

    have: tuple[Span, ...]
    want: tuple[Span, ...]
    itemsize: int

    @property
    def axes(self) -> Cut:
        """The axes along which a rank's senders may differ from it."""
        return tuple(chain(*(h.cut for h, w in zip(self.have, self.want, strict=True) if h != w)))

    def words(self, sizes: Sizes) -> Any:
        """Return the elements that each rank receives, as an array over the grid's coordinates.

        They are those that its target block has and its source block lacks.
        """
        items = tuple(sizes.items())
        target: Any = 1
        both: Any = 1
        for have, want in zip(self.have, self.want, strict=True):
            length, overlap = _met(have, want, items)
            target, both = target * length, both * overlap
        return np.broadcast_to(target - both, tuple(n for _, n in items))

    def most_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the rank that receives the most."""
        return self.itemsize * int(self.words(sizes).max())


@lru_cache(maxsize=4096)
def _met(have: Span, want: Span, sizes: tuple[tuple[str, int], ...]) -> tuple[Any, Any]:
    """Return how many items of a dim each rank wants, and how many of them it has."""
    first, last = _bounds(want, sizes)
    start, stop = _bounds(have, sizes)
    return last - first, np.maximum(0, np.minimum(last, stop) - np.maximum(first, start))


@lru_cache(maxsize=1024)
def _bounds(dim: Span, sizes: tuple[tuple[str, int], ...]) -> tuple[Any, Any]:
    """Return where the pieces of a dim start and stop, as arrays that broadcast over the grid's coordinates."""
    start: Any = np.zeros((1,) * len(sizes), np.int64)
    length: Any = start + dim.n
    axes = [axis for axis, _ in sizes]
    for axis in dim.cut:
        at, p = axes.index(axis), sizes[axes.index(axis)][1]
        i = np.arange(p).reshape([p if d == at else 1 for d in range(len(sizes))])
        start = start + i * (length // p) + np.minimum(i, length % p)
        length = length // p + (i < length % p)
    return np.minimum(dim.items, start * dim.unit), np.minimum(dim.items, (start + length) * dim.unit)


@dataclass(frozen=True)
class Line:
    """A dim to be transformed.

    Attributes
    ----------
    dim : int
    n : int
        The points of the transform.
    given, kept : int
        The elements of the dim that enter, the others being zero, and those of the result.
    """

    dim: int
    n: int
    given: int
    kept: int


@dataclass(frozen=True)
class Problem:
    """A transform of an array of `shape`.

    Attributes
    ----------
    lines : tuple of Line
    kind : {"c2c", "r2c", "c2r"}
        Complex; real input, whose last line is transformed first; real output, whose last line is transformed last.
    itemsizes : tuple of int
        Bytes of an element of the input, of a complex number between, and of the result.
    """

    shape: Shape
    lines: tuple[Line, ...]
    kind: str
    itemsizes: tuple[int, int, int]

    def shape_when(self, left: Left, raw: bool) -> Shape:
        """Return the shape while these lines are left; `raw`: no element that does not enter is dropped yet."""
        shape = list(self.shape)
        for i, line in enumerate(self.lines):
            if i not in left:
                shape[line.dim] = line.kept
            elif not raw:
                shape[line.dim] = line.given
        return tuple(shape)

    def itemsize_when(self, left: Left) -> int:
        return self.itemsizes[0 if len(left) == len(self.lines) else 1 if left else 2]

    def ready(self, layout: Layout, left: Left) -> Left:
        """Return the lines that can be transformed where they lie."""
        last = len(self.lines) - 1
        whole = tuple(i for i in left if not layout.dims[self.lines[i].dim])
        if self.kind == "r2c" and last in left and last not in whole:
            return ()
        if self.kind == "c2r" and len(whole) < len(left):
            return tuple(i for i in whole if i != last)
        return whole


@dataclass(frozen=True)
class Local:
    """Transforms of whole dims, by this process alone."""

    lines: tuple[Line, ...]
    real: bool  # the last of the lines is the one of real input or output
    exchanges: tuple[Exchange, ...] = ()


@dataclass(frozen=True)
class Transpose:
    """A change of layout, which also drops the elements that do not enter: `before` and `after` are the shapes."""

    src: Layout
    dst: Layout
    before: Shape
    after: Shape
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True)
class FourStep:
    """The transform of a cut line of n₁ n₂ points, which stays cut; `rows` and `columns` are n₁ and n₂.

    Element `columns · i + j` of the line is (i, j) of a matrix; element `k + rows · l` of the result is (k, l).  Of the
    matrix only the rows with elements that enter move, and of the result only the columns that are kept.
    """

    line: Line
    real: bool
    rows: int
    columns: int
    exchanges: tuple[Exchange, ...]


Step = Local | Transpose | FourStep


@dataclass(frozen=True)
class Plan:
    """The steps of a transform, alike on all ranks.

    Attributes
    ----------
    steps : tuple of Local, Transpose or FourStep
    layout : Layout
        The layout of the result, without axes of one rank.

    `print(plan)` lists the steps.
    """

    steps: tuple[Step, ...]
    layout: Layout
    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        """Return one line for each step; its words are those of the rank that receives the most."""
        sizes, lines = dict(self.sizes), []
        for step in self.steps:
            most = f"{sum(int(e.words(sizes).max()) for e in step.exchanges):,} words"
            if isinstance(step, Transpose):
                lines.append(f"move {step.src!r} to {step.dst!r}: {most}")
            elif isinstance(step, FourStep):
                shape = f"{step.rows} × {step.columns}"
                lines.append(f"transform dim {step.line.dim} where it is cut, as {shape} points: {most}")
            else:
                dims = [str(line.dim) for line in step.lines]
                lines.append(f"transform dim{'s' * (len(dims) > 1)} {', '.join(dims)}")
        return "\n".join(lines)

    @cached_property
    def _words(self) -> Any:
        every = [e.words(dict(self.sizes)) for step in self.steps for e in step.exchanges]
        return sum(every, np.zeros(tuple(n for _, n in self.sizes), np.int64))

    def words(self, coords: Mapping[str, int]) -> int:
        """Return the elements that the rank at `coords` receives."""
        return int(self._words[tuple(coords[axis] for axis, _ in self.sizes)])


def make_plan(problem: Problem, layout: Layout, goal: Layout | None, sizes: Sizes) -> Plan:
    """Return the plan that moves the fewest bytes.

    Parameters
    ----------
    problem : Problem
    layout, goal : Layout
        The layouts of the input and of the result, without partial axes and axes of one rank.  Without a goal the
        result rests where the last transform leaves it.
    """
    return _search(problem, layout, goal, tuple(sizes.items()))


@lru_cache(maxsize=512)
def _search(problem: Problem, layout: Layout, goal: Layout | None, items: tuple[tuple[str, int], ...]) -> Plan:
    """Search by A*; a state is a layout, the lines that are left, and whether elements are still to be dropped."""
    sizes, number = dict(items), count()
    start, left = _transform_ready(problem, layout, tuple(range(len(problem.lines))))
    heap: list[tuple[int, int, int, int, Layout, Left, bool, tuple[Step, ...]]]
    heap = [(0, 0, next(number), 0, layout, left, True, start)]
    done: set[tuple[Layout, Left, bool]] = set()
    while heap:
        _, messages, _, cost, at, left, raw, steps = heapq.heappop(heap)
        if (at, left, raw) in done:
            continue
        done.add((at, left, raw))
        if not left and goal in (None, at):
            return Plan(steps, at, items)
        for step, then, lines, still_raw in _next(problem, at, left, raw, goal, sizes):
            local, rest = _transform_ready(problem, then, lines)
            if (then, rest, still_raw) not in done:
                moved = cost + sum(e.most_bytes(sizes) for e in step.exchanges)
                sent = messages + sum(span_of(e.axes, sizes) - 1 for e in step.exchanges)
                bound = moved + _still(problem, then, rest, goal, items)
                heapq.heappush(heap, (bound, sent, next(number), moved, then, rest, still_raw, (*steps, step, *local)))
    raise AssertionError("a whole array can always be transformed")


@lru_cache(maxsize=4096)
def _still(
    problem: Problem, layout: Layout, left: Left, goal: Layout | None, items: tuple[tuple[str, int], ...]
) -> int:
    """Return the fewest bytes that a way from a state to the goal may take.

    A rank receives what its block in the goal lacks.  And where a dim that q ranks cut becomes whole, or a whole one is
    cut by q ranks, the average rank receives all but 1 / q of its block.
    """
    sizes, every = dict(items), tuple(range(len(problem.lines)))
    shape = tuple(map(min, problem.shape_when((), False), problem.shape_when(every, False)))
    lacks = 0
    if goal is not None:
        lacks = Exchange(spans(layout, shape), spans(goal, shape), min(problem.itemsizes)).most_bytes(sizes)
    total, ranks = math.prod(shape) * min(problem.itemsizes), math.prod(sizes.values())
    for i in left:
        dim = problem.lines[i].dim
        cuts = [span_of(cut, sizes) for cut in (layout.dims[dim], () if goal is None else goal.dims[dim])]
        lacks = max(lacks, sum(total * (q - 1) // (q * ranks) for q in cuts))
    return lacks


def _transform_ready(problem: Problem, layout: Layout, left: Left) -> tuple[tuple[Step, ...], Left]:
    """Return the transform of the lines that are whole, if any are, and the lines that are left then."""
    if not (ready := problem.ready(layout, left)):
        return (), left
    real = problem.kind != "c2c" and len(problem.lines) - 1 in ready
    return (Local(tuple(problem.lines[i] for i in ready), real),), tuple(i for i in left if i not in ready)


def _next(
    problem: Problem, layout: Layout, left: Left, raw: bool, goal: Layout | None, sizes: Sizes
) -> Iterator[tuple[Step, Layout, Left, bool]]:
    """Yield the steps that may follow, with the layout, the lines left and whether elements are still to be dropped."""
    before, after = problem.shape_when(left, raw), problem.shape_when(left, False)
    itemsize, last = problem.itemsize_when(left), len(problem.lines) - 1

    def transpose(to: Layout) -> Transpose:
        exchange = Exchange(spans(layout, before), spans(to, after), itemsize)
        return Transpose(layout, to, before, after, (exchange,))

    if not left:
        assert goal is not None
        yield transpose(goal), goal, (), False
        return
    cut = [i for i in left if layout.dims[problem.lines[i].dim]]
    first = last if problem.kind == "r2c" and last in left else None
    for size in range(1, len(cut) + 1):
        for chosen in combinations(cut, size):
            if first is None or first in chosen or first not in cut:
                for to in _freed(layout, [problem.lines[i].dim for i in chosen], after, sizes):
                    if problem.ready(to, left):
                        yield transpose(to), to, left, False
    for i in cut:
        if (first is None or i == first) and (problem.kind != "c2r" or i != last or len(left) == 1):
            rest = tuple(j for j in left if j != i)
            real = problem.kind != "c2c" and i == last
            step = _four_step(problem, layout, i, before, real, itemsize, rest)
            if step is not None:
                yield step, layout, rest, raw


def _freed(layout: Layout, dims: list[int], shape: Shape, sizes: Sizes) -> Iterator[Layout]:
    """Yield the layouts in which these dims are whole.

    Their axes go to other dims, behind the axes there; they are gathered where no other dim has items left to cut.
    """
    axes = list(chain(*(layout.dims[d] for d in dims)))
    cuts = [() if d in dims else cut for d, cut in enumerate(layout.dims)]
    places: list[int | None] = [d for d, n in enumerate(shape) if d not in dims and n > 1]
    for chosen in product(places or [None], repeat=len(axes)):
        to = list(cuts)
        for axis, d in zip(axes, chosen, strict=True):
            if d is not None and span_of(to[d], sizes) < shape[d]:
                to[d] = (*to[d], axis)
        yield Layout(*to)


def _four_step(
    problem: Problem, layout: Layout, i: int, shape: Shape, real: bool, given: int, rest: Left
) -> FourStep | None:
    """Return the step that transforms line `i` where it is cut; None if its length is prime.

    `given` are the bytes of an element before it, `rest` the lines that are left after it.
    """
    line = problem.lines[i]
    rows = next(r for r in range(math.isqrt(line.n), 0, -1) if line.n % r == 0)
    if rows == 1:
        return None
    columns, cut, d = line.n // rows, layout.dims[line.dim], line.dim
    filled, used = -(-line.given // columns), -(-line.kept // rows)
    others = spans(layout, shape)

    def with_line(*dims: Span) -> tuple[Span, ...]:
        return (*others[:d], *dims, *others[d + 1 :])

    between = problem.itemsizes[1]
    result = between if rest else problem.itemsizes[2]
    exchanges = (
        Exchange(with_line(others[d]), with_line(Span(filled, cut, columns, line.given)), given),
        Exchange(with_line(Span(filled, cut), Span(columns)), with_line(Span(filled), Span(columns, cut)), given),
        Exchange(with_line(Span(rows), Span(columns, cut)), with_line(Span(rows, cut), Span(columns)), between),
        Exchange(with_line(Span(rows, cut), Span(columns)), with_line(Span(rows), Span(used, cut)), result),
        Exchange(with_line(Span(used, cut, rows, line.kept)), with_line(Span(line.kept, cut)), result),
    )
    return FourStep(line, real, rows, columns, exchanges)
