"""Operands and terms of a product in memory that the ranks of one node have in common, where a single step moves them.

A gather is then one write of this rank's piece to its place in the whole, whatever dim is cut, and a reduce-scatter a
sum of the terms where they lie.  The ledger counts the words they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parlinalg.array import DistArray
from parlinalg.comm.shared import common
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.matmul.local import is_half, local_product
from parlinalg.moves import Step, moves
from parlinalg.plan import Plan
from parlinalg.redistribute import inside, redistribute

Block = Any
Shape = tuple[int, ...]
CHUNK = 1 << 15
"""Elements that are summed over all terms before the next ones, so that they stay in cache."""


@contextmanager
def at_work_for_now(array: DistArray, work: Layout) -> Iterator[Block]:
    """The block of an operand where the local product needs it, for the length of a `with` block; not to be written."""
    grid, shape, order = array.grid, array.shape, array.order
    if (step := _only("all_gather", array.layout, work, grid)) is not None:
        comm = grid.comm(step.axes)
        target = grid.block_shape(work, shape)
        stored = target if order is None else tuple(target[d] for d in order)
        with common(comm, stored, array.block.dtype) as whole:
            if whole is not None:
                if order is not None:
                    whole = whole.transpose(tuple(order.index(d) for d in range(len(order))))
                whole[inside(grid.block(array.layout, shape), grid.block(work, shape))] = array.block
                comm.count("all_gather", whole.size - array.block.size, whole.itemsize)
                comm.barrier()
                yield whole
                return
    yield redistribute(array.block, array.layout, work, shape, grid, order=order)


def multiplied(plan: Plan, xs: Block, ws: Block, shape: Shape, dtype: Any, grid: Grid) -> Block:
    """This rank's block of y at rest, from the blocks of x and w at work."""
    step = _only("reduce_scatter", plan.y_work, plan.y, grid)
    if step is not None and not is_half(dtype) and dtype.kind != "b":
        comm = grid.comm(step.axes)
        with common(comm, (comm.size, *grid.block_shape(plan.y_work, shape)), dtype) as terms:
            if terms is not None:
                local_product(plan, xs, ws, dtype, out=terms[comm.rank])
                comm.barrier()
                part = inside(grid.block(plan.y, shape), grid.block(plan.y_work, shape))
                out = grid.backend.empty(grid.block_shape(plan.y, shape), dtype)
                _sum([term[part] for term in terms], out)
                comm.count("reduce_scatter", terms[0].size - out.size, out.itemsize)
                return out
    y = local_product(plan, xs, ws, dtype)
    return redistribute(y, plan.y_work, plan.y, shape, grid, owned=True)


def _only(op: str, src: Layout, dst: Layout, grid: Grid) -> Step | None:
    """The step from `src` to `dst`, if it is a single one of this kind between blocks in host memory."""
    if not grid.backend.host_memory:
        return None
    steps = moves(src, dst, grid.sizes)
    return steps[0] if len(steps) == 1 and steps[0].op == op else None


def _sum(terms: list[Block], out: Block) -> None:
    """The sum of the terms, in their order."""
    rows = max(1, CHUNK // max(1, math.prod(out.shape[1:])))
    for start in range(0, len(out), rows):
        part = slice(start, start + rows)
        total = out[part]
        total[...] = terms[0][part]
        for term in terms[1:]:
            total += term[part]
