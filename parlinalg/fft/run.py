"""Carrying out the plan of a Fourier transform on this rank's block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.backend import namespace
from parlinalg.exchange import Rect, exchange_blocks, piece_size
from parlinalg.fft.plan import Exchange, FourStep, Line, Local, Plan, Span
from parlinalg.grid import Grid
from parlinalg.layout import Cut, coordinates
from parlinalg.redistribute import Move, redistribute

Block = Any
Coords = Mapping[str, int]


@dataclass(frozen=True)
class Direction:
    """The sign of the exponent, and the norm.

    Attributes
    ----------
    kind : {"c2c", "r2c", "c2r"}
    inverse : bool
        The exponent is +2πi jk / n, not -2πi jk / n.
    norm : {"backward", "ortho", "forward"}
        With "backward" an inverse transform is divided by n, with "forward" another one.
    """

    kind: str
    inverse: bool
    norm: str


def run(x: DistArray, plan: Plan, way: Direction) -> Block:
    """Return this rank's block of the transform of `x`, in the plan's layout, with `x`'s partial axes.

    The terms of an array over partial axes are transformed as terms: a Fourier transform is linear.
    """
    grid, block, partial = x.grid, x.block, x.grid.effective(x.layout).partial
    for step in plan.steps:
        mine = block is not x.block
        if isinstance(step, Local):
            block = _local(block, step, way, grid, mine)
        elif isinstance(step, FourStep):
            block = _four_step(block, step, way, grid)
        elif step.before == step.after:
            src, dst = step.src.with_partial(partial), step.dst.with_partial(partial)
            order = None if mine else x.order
            block = redistribute(block, src, dst, step.after, grid, owned=mine, order=order)
        else:
            block = move(block, step.exchanges[0], grid)
    return block


def move(block: Block, step: Exchange, grid: Grid) -> Block:
    """Return the block of the target of an exchange; a new one.  Collective over the step's axes."""

    def rect(dims: tuple[Span, ...]) -> Callable[[Coords], Rect]:
        return lambda at: tuple(d.at(grid.sizes, at) for d in dims)

    return _fetch(block, rect(step.have), rect(step.want), step.axes, grid)


def _fetch(
    block: Block, have: Callable[[Coords], Rect], want: Callable[[Coords], Rect], over: Cut, grid: Grid
) -> Block:
    """Return the elements that this rank wants, from the ranks that differ from it along some axes."""
    axes = tuple(a for a in grid.axes if a in over)
    peers = [{**grid.coords, **at} for at in coordinates(axes, grid.sizes)]
    haves, wants = [have(at) for at in peers], [want(at) for at in peers]
    return Move(exchange_blocks(block, haves, wants, grid.comm(axes), grid.backend)).wait()


def floating(dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which numbers are transformed: float32 for 16 bits, float64 for integers, else the same."""
    dtype = np.dtype(dtype)
    if dtype.kind in "biu":
        return np.dtype(np.float64)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def complexes(dtype: Any) -> np.dtype[Any]:
    """Return the complex dtype of a transform of numbers of this dtype."""
    return np.result_type(floating(dtype), np.complex64)


def reals(dtype: Any) -> np.dtype[Any]:
    """Return the dtype of the real parts of `complexes(dtype)`."""
    return np.dtype(f"f{complexes(dtype).itemsize // 2}")


def _local(block: Block, step: Local, way: Direction, grid: Grid, mine: bool) -> Block:
    """Transform whole dims: first the line of real input, last the line of real output."""
    plain = step.lines[:-1] if step.real else step.lines
    if step.real and way.kind == "r2c":
        block, mine = _transform(block, step.lines[-1:], "rfft", way, grid, mine), True
    if plain:
        block, mine = _transform(block, plain, "ifftn" if way.inverse else "fftn", way, grid, mine), True
    if step.real and way.kind == "c2r":
        block = _transform(block, step.lines[-1:], "irfft", way, grid, mine)
    return block


def _transform(block: Block, lines: tuple[Line, ...], name: str, way: Direction, grid: Grid, mine: bool) -> Block:
    """Call the function of this name of SciPy or CuPy; `mine`: the block may be overwritten."""
    shape = list(block.shape)
    for line in lines:
        shape[line.dim] = line.kept
    dtype = (reals if name == "irfft" else complexes)(block.dtype)
    if not block.size or not math.prod(shape):
        return grid.backend.zeros(tuple(shape), dtype)
    wide = floating(block.dtype)
    if block.dtype != wide:
        block, mine = block.astype(wide), True
    options: dict[str, Any] = {"norm": way.norm}
    if grid.backend.cpu:
        options |= {"workers": grid.threads, "overwrite_x": mine}
    if name in ("fftn", "ifftn"):
        options |= {"s": [line.n for line in lines], "axes": [line.dim for line in lines]}
    else:
        options |= {"n": lines[0].n, "axis": lines[0].dim}
    return getattr(grid.backend.fft, name)(block, **options)


def _four_step(block: Block, step: FourStep, way: Direction, grid: Grid) -> Block:
    """Transform a cut line as a matrix of `step.rows` and `step.columns`."""
    d, (rows, columns), line = step.line.dim, (step.rows, step.columns), step.line
    real = way.kind if step.real else ""
    name = "ifftn" if way.inverse else "fftn"
    edges, across, back, over, last = step.exchanges

    def held(move: Exchange, dim: int) -> range:
        return move.want[dim].at(grid.sizes, grid.coords)

    # x[rows/C, columns] := x[n/C]: neighbours exchange the ends of their pieces
    block = _matrix(move(block, edges, grid), d, len(across.have[d].at(grid.sizes, grid.coords)), columns)
    # x[rows, columns/C] := x[rows/C, columns], transformed along the rows' index
    block = move(block, across, grid)
    if real == "c2r":
        block = _doubled(block, d, held(across, d + 1), step)
    block = _transform(block, (Line(d, rows, rows, rows),), name, way, grid, True)
    _twiddle(block, d, held(across, d + 1), line.n, way.inverse)
    # x[rows/C, columns] := x[rows, columns/C], transformed along the columns' index
    block = move(block, back, grid)
    block = _transform(block, (Line(d + 1, columns, columns, columns),), name, way, grid, True)
    if real == "c2r":
        block = block.real
    # y[n/C] := x[rows, columns/C], read column by column
    block = move(block, over, grid).swapaxes(d, d + 1)
    block = block.reshape((*block.shape[:d], block.shape[d] * rows, *block.shape[d + 2 :]))
    return move(block[(*(slice(None),) * d, slice(len(last.have[d].at(grid.sizes, grid.coords))))], last, grid)


def _matrix(block: Block, d: int, rows: int, columns: int) -> Block:
    """Return a dim as rows of so many columns, zeros behind its end."""
    lead, rest = block.shape[:d], block.shape[d + 1 :]
    if block.shape[d] < rows * columns:
        full = namespace(block).zeros((*lead, rows * columns, *rest), block.dtype)
        full[(*(slice(None),) * d, slice(block.shape[d]))] = block
        block = full
    return block.reshape((*lead, rows, columns, *rest))


def _doubled(block: Block, d: int, held: range, step: FourStep) -> Block:
    """Return the half spectrum with all counted twice that the other half, its conjugate, counts too."""
    xp, n = namespace(block), step.line.n
    k = step.columns * xp.arange(block.shape[d])[:, None] + xp.arange(held.start, held.stop)[None, :]
    factor = xp.where((k == 0) | (2 * k == n), 1.0, 2.0).astype(reals(block.dtype))
    return block * factor.reshape(factor.shape + (1,) * (block.ndim - d - 2))


def _twiddle(block: Block, d: int, held: range, n: int, inverse: bool) -> None:
    """Multiply element (k, j) of dims d and d + 1 by e^(∓2πi jk / n), j from `held`, some rows at a time."""
    xp, rest = namespace(block), (1,) * (block.ndim - d - 2)
    j = xp.arange(held.start, held.stop)
    step = max(1, piece_size(block.size) // max(1, len(held)))
    for start in range(0, block.shape[d], step):
        k = xp.arange(start, min(block.shape[d], start + step))
        angle = (k[:, None] * j[None, :] % n) * ((2 if inverse else -2) * math.pi / n)
        factor = xp.exp(1j * angle).astype(block.dtype)
        block[(*(slice(None),) * d, slice(start, start + step))] *= factor.reshape(factor.shape + rest)
